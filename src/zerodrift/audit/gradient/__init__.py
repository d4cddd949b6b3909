"""What a gap does to the step that would be trained: the gradient of one batch by the engine's numbers and by true ones."""

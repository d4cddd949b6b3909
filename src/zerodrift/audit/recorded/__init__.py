"""Questions that recorded rollouts can answer without an engine: since when, which weights, which side."""

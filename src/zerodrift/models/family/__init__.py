"""Where a model keeps its parts, one small file per family: for exact mode, update accounts and weight faults alike."""

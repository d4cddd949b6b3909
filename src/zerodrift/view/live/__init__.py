"""The live page of a training: files that are tailed, kept as columns, and sent to browsers as they grow."""

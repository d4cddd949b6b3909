"""A proxy in front of a vLLM: salts caches by weight version, and holds samples against the trainer."""

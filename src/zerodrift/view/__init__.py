"""Pages for people, rendered from a run directory alone."""

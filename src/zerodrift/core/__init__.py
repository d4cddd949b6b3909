"""Pure values: requests, completions, weight versions, causes, errors. Nothing here computes or reads a file."""

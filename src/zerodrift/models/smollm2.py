"""Where `make smollm2` puts a small trained model: SmolLM2-135M-Instruct, as a directory and as a GGUF file beside it."""

from pathlib import Path

DEFAULT_DIRECTORY = Path(".cache/smollm2")
COMPLETE = "complete"
"""Marker file, written last."""


def gguf_path(directory: Path) -> Path:
    """Where the GGUF file of `directory` is kept: the same numbers, in Q4_1."""
    return directory.with_name(directory.name + ".gguf")

"""What does a directory of safetensors hold? Answered from the headers; a tensor is read when it is asked for.

Only safetensors: reading them runs no code. Files stay mapped while a checkpoint is held, so one that is replaced
in the meantime is still read as it was.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Shape = tuple[int, ...]


class Checkpoint:
    """Tensors by name."""

    def __init__(self, directory: str) -> None:
        """Open the files and read their headers; ValueError where the directory is not what is needed."""
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ValueError(f"{directory} is no directory that this server can see")
        self._files: dict[str, Any] = {}
        shapes: dict[str, Shape] = {}
        for path in _files(self.directory):
            try:
                opened: Any = safe_open(path, framework="pt", device="cpu")
                found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - no mapping
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read as safetensors ({error})") from error
            if twice := sorted(found.keys() & shapes.keys()):
                raise ValueError(
                    f"{directory} holds {twice[0]} twice, once in {path.name}; which one is meant?"
                )
            shapes |= found
            self._files |= dict.fromkeys(found, opened)
        self.shapes: Mapping[str, Shape] = MappingProxyType(shapes)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, as it lies on disk."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


def _files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if not (directory / INDEX).is_file():
        raise ValueError(f"{directory} has neither {WEIGHTS} nor {INDEX}; other formats are not read")
    try:
        names = sorted(
            {str(name) for name in json.loads((directory / INDEX).read_bytes())["weight_map"].values()}
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory / INDEX} is no index of shards ({error!r})") from error
    for name in names:
        # A shard lies beside its index; anything longer than a file name is a way out of the directory.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{directory / INDEX} names the shard {name!r}; a shard is a .safetensors file beside it"
            )
    return [directory / name for name in names]

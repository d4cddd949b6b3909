"""Versions that were sent to a server, as long as a token of theirs may be scored again."""

import shutil
from pathlib import Path
from typing import Any

from zerodrift.core.errors import NotRetained
from zerodrift.core.version import WeightVersion
from zerodrift.engine.weights import StagedWeights, stage
from zerodrift.weights.files import read_update


class KeptVersions:
    """Directories of updates below one root, the last few; older ones are removed."""

    def __init__(self, root: Path, model: Any, retain: int) -> None:
        """`model` has the shape of all of them. What an earlier process left is removed."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        self.root, self._model, self._retain = root, model, retain
        self._folders: dict[WeightVersion, str] = {}

    def add(self, version: WeightVersion, folder: str) -> None:
        """One that serves now; the oldest makes room."""
        self._folders.pop(version, None)
        self._folders[version] = folder
        while len(self._folders) > self._retain:
            shutil.rmtree(self.root / self._folders.pop(next(iter(self._folders))))

    def has(self, version: WeightVersion) -> bool:
        """Whether its weights are still there."""
        return version in self._folders

    def weights_of(self, version: WeightVersion) -> StagedWeights:
        """Read from the disk, and held against the digest."""
        if version not in self._folders:
            raise NotRetained(f"version {version.label!r} is not kept any more; raise train.max_lag")
        with read_update(self.root, self._folders[version]) as (_, tensors):
            return stage(self._model, dict(tensors), version)

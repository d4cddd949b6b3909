"""Where new weights go: one protocol for engines in this process, behind a network, and for servers that are not ours.

`prepare` brings a whole version to an engine, verified, and serves nothing of it; `publish` serves it; `abort` forgets it.
Who can go back to the version before says so; a vLLM server cannot, and is published to last.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from zerodrift.backends.base import Backend, Capability, need
from zerodrift.backends.vllm import VllmBackend
from zerodrift.core.errors import OutOfOrder
from zerodrift.core.version import WeightVersion
from zerodrift.engine.updates import Updates, WeightUpdate
from zerodrift.weights.files import write_update
from zerodrift.weights.session import Stage
from zerodrift.weights.update import UpdateManifest

CONFIG = "config.json"


class WeightTarget(Protocol):
    """One engine, as a publisher sees it."""

    name: str
    goes_back: bool
    """Whether `roll_back` brings the version before it back, bit for bit."""

    def prepare(self, update: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take all of it, or refuse and be as before."""
        ...

    def publish(self) -> None:
        """Serve what was prepared."""
        ...

    def abort(self) -> None:
        """Forget what was prepared; nothing, where nothing was."""
        ...

    def roll_back(self) -> None:
        """Serve the version before once more."""
        ...


class InProcess:
    """An exact engine in this process."""

    goes_back = True

    def __init__(self, updates: Updates, *, name: str = "exact", kv: str = "recompute") -> None:
        """`kv` is what becomes of requests in flight."""
        self.name, self._updates, self._kv = name, updates, kv
        self._under_way: WeightUpdate | None = None
        self._published: str | None = None
        self._serves = updates.current
        """By what this target knows: whoever else published since is not overwritten."""

    def prepare(self, update: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """On the disk when this returns."""
        opened = self._updates.begin(update, self._serves)
        try:
            for record in update.weights.tensors:
                opened.push(record.name, tensors[record.name])
            opened.verify()
            opened.commit()
        except BaseException:
            if opened.stage is not Stage.ABORTED:
                opened.abort()
            raise
        self._under_way, self._published = opened, update.version

    def publish(self) -> None:
        """Between two steps."""
        if self._under_way is None:
            raise OutOfOrder(f"{self.name} has no update to publish; prepare one first")
        self._serves = self._under_way.publish(self._kv)
        self._under_way = None

    def abort(self) -> None:
        """The old version serves on."""
        if (under_way := self._under_way) is not None:
            self._under_way = None
            under_way.abort()

    def roll_back(self) -> None:
        """Also of an update that only this target has served."""
        if self._published is None:
            raise OutOfOrder(f"{self.name} was published nothing by this publisher")
        self._serves = self._updates.rollback(self._published)


class ServerTarget:
    """A running server that reads directories: vLLM, by its own protocol, paused while it does."""

    goes_back = False

    def __init__(
        self, backend: Backend, exchange: Path, checkpoint: Path, *, name: str, retain: int | None = 2
    ) -> None:
        """`exchange`: a directory that both sides see; `checkpoint`: that of the model, whose config.json goes along; `retain`:
        how many of the versions that were sent stay in `exchange`; None: all."""
        need(backend, Capability.LOAD_WEIGHTS, "start vLLM with VLLM_SERVER_DEV_MODE=1")
        self.name, self.backend = name, backend
        self._exchange, self._config = Path(exchange), (Path(checkpoint) / CONFIG).read_bytes()
        self.retain = retain
        self._prepared: WeightVersion | None = None
        self._directory: Path | None = None
        self._sent: dict[Path, None] = {}

    def prepare(self, update: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """As a directory of its own, which the server reads when it is told to."""
        self._exchange.mkdir(parents=True, exist_ok=True)
        folder = update.identity[:32]
        # Sent before and again, or by another server's target: the name says what is in it.
        shutil.rmtree(self._exchange / folder, ignore_errors=True)
        write_update(self._exchange, folder, update, tensors)
        (self._exchange / folder / CONFIG).write_bytes(self._config)
        self._prepared, self._directory = update.weight_version, self._exchange / folder

    def publish(self) -> None:
        """Nothing is in flight while it reads, and nothing that it cached before is used again."""
        if (version := self._prepared) is None or (directory := self._directory) is None:
            raise OutOfOrder(f"{self.name} has no update to publish; prepare one first")
        # From here on it may read there, also where no answer comes.
        self._prepared = None
        self._keep_last(directory)
        resets = Capability.RESET_CACHE in self.backend.capabilities
        if isinstance(self.backend, VllmBackend):
            with self.backend.paused():
                self.backend.load_weights(directory, version)
                # Before anybody who waited can find what the old weights left there.
                resets = resets and not self.backend.drop_cache()
        else:
            self.backend.load_weights(directory, version)
        if resets:
            self.backend.reset_cache()  # and, of a server that does not say so, look whether it did

    def abort(self) -> None:
        """What was prepared and not sent is removed."""
        if self._prepared is not None and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._sent.pop(self._directory, None)
        self._prepared = None

    def _keep_last(self, directory: Path) -> None:
        self._sent.pop(directory, None)
        self._sent[directory] = None
        while self.retain is not None and len(self._sent) > self.retain:
            oldest = next(iter(self._sent))
            del self._sent[oldest]
            shutil.rmtree(oldest, ignore_errors=True)

    def roll_back(self) -> None:
        """It cannot."""
        raise OutOfOrder(
            f"{self.name} cannot go back; send it the weights of the version before as an update"
        )

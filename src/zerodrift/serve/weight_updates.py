"""vLLM's weight calls as transactions: each update is served whole and verified, or never.

    init → start → update (one or several directories) → finish        vLLM, TRL, our own publisher
    update {"weight_dir": …}                                           prime-rl: all of that at once

Clients call `finish` in a `finally`, also where `update` was refused: then there is nothing to finish, it says so, and the
old weights serve on. A client that sends no version gets `auto-N`, with the digest that says what N is.
"""

import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from zerodrift.core.errors import CapabilityMissing, InvalidValue, ModelError, OutOfOrder, VersionConflict
from zerodrift.core.version import WeightVersion
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.updates import Updates
from zerodrift.engine.weights import StagedWeights
from zerodrift.serve.control_wire import Directory
from zerodrift.serve.wire import as_body
from zerodrift.weights.checkpoint_folder import CheckpointFolder
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.folder import TensorBytes
from zerodrift.weights.listing import manifest_of
from zerodrift.weights.of_model import ties_of
from zerodrift.weights.update import UpdateManifest

BACKEND = "zerodrift"
"""What the transfer is called in /server_info, as that of our vLLM plugin is."""
_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
"""Into which a dtype goes without rounding."""


class _Open:
    """An update while it is sent."""

    def __init__(self, expect: str | None) -> None:
        self.expect = expect
        self.state: dict[str, torch.Tensor] = {}
        self.staged: StagedWeights | None = None
        self.manifest: UpdateManifest | None = None
        self.failed: str | None = None


class Sent(NamedTuple):
    """What a directory held."""

    tensors: dict[str, torch.Tensor]
    manifest: UpdateManifest | None
    """What the trainer said of it, where it did."""


class WeightUpdates:
    """One engine's, for one trainer at a time. Any thread."""

    def __init__(self, loop: EngineLoop, *, root: Path | None, state: Path | None) -> None:
        """`root`: where updates are read; `state`: where versions are kept, and taken up again at the next start."""
        self._loop = loop
        self._root = None if root is None else root.resolve(strict=True)
        self._mutex = threading.Lock()
        self._initialised = False
        self._open: _Open | None = None
        self._kept: Updates | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if state is not None:
            self._kept = Updates(loop, state)

    def close(self) -> None:
        """Let go of the directory."""
        if self._kept is not None:
            self._kept.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def is_open(self) -> bool:
        """Whether an update is under way."""
        return self._open is not None

    def init(self, info: Mapping[str, Any]) -> None:
        """The one transport there is: directories that trainer and server both see."""
        self._need_root()
        unknown = info.keys() - {"backend", "checkpoint"}
        if unknown or info.get("backend", BACKEND) != BACKEND:
            raise CapabilityMissing(
                f"this server takes weights as directories, and init_info has {sorted(map(str, info))[:6]}; NCCL and IPC are "
                "not spoken: send {} here, and {'directory': PATH} as update_info"
            )
        with self._mutex:
            if self._open is not None:
                raise OutOfOrder("an update is under way; finish it before the transfer is set up anew")
            self._initialised = True

    def shutdown(self) -> None:
        """Abort what is open."""
        with self._mutex:
            self._open, self._initialised = None, False

    def start(self, expect: str | None) -> None:
        """Open an update."""
        with self._mutex:
            if not self._initialised:
                raise OutOfOrder("no transfer is set up; POST /init_weight_transfer_engine first")
            if self._open is not None:
                raise VersionConflict("another update is under way; finish it, or wait for whoever began it")
            self._require_current(expect)
            self._open = _Open(expect)

    def add(self, info: Any) -> None:
        """More of the open update. What is refused spoils it: `finish` then ends it."""
        with self._mutex:
            if (update := self._open) is None:
                raise OutOfOrder("no update is open; POST /start_weight_update first")
            if update.failed is not None:
                raise OutOfOrder(f"this update failed before ({update.failed}); finish it, and start anew")
            try:
                self._take(update, info)
            except BaseException as error:
                update.failed = getattr(error, "code", type(error).__name__)
                update.state, update.staged = {}, None
                raise

    def finish(self, label: str | None, kv: str) -> WeightVersion:
        """Serve what was sent; after this no update is open, whatever happened."""
        with self._mutex:
            update, self._open = self._open, None
            if update is None:
                raise OutOfOrder(
                    "no update is open, so there is none to finish; the weights are what they were"
                )
            if update.failed is not None:
                raise OutOfOrder(
                    f"the update was refused before ({update.failed}) and is aborted now; the old weights serve on"
                )
            if not update.state:
                raise OutOfOrder("nothing was sent since the update was started; it is aborted")
            self._require_current(update.expect)
            staged = update.staged or self._loop.engine.stage_weights(update.state, "pending")
            return self._publish(staged.tensors, label, update.manifest, kv)

    def whole(self, path: str | None, expect: str | None, kv: str) -> WeightVersion:
        """A whole update out of one directory."""
        if path is None:
            raise CapabilityMissing(
                "weight_dir is null, which asks for a broadcast; this server reads directories"
            )
        with self._mutex:
            if self._open is not None:
                raise VersionConflict("another update is under way; wait for its end")
            self._require_current(expect)
            sent = self._read(path)
            staged = self._loop.engine.stage_weights(sent.tensors, "pending")
            return self._publish(staged.tensors, None, sent.manifest, kv)

    def relabel(self, label: str) -> WeightVersion:
        """The weights that are served under another label; the digest stays, so no KV is lost."""
        with self._mutex:
            if self._open is not None:
                raise VersionConflict("an update is under way; its label is given when it is finished")
            return self._publish(self._loop.retain_weights().tensors, label, None, "keep")

    def checksums(self) -> dict[str, str]:
        """Of the tensors that run, each read between two steps."""
        records = manifest_of(self._loop.retain_weights().tensors).tensors
        return {record.name: record.xxh3_128 for record in records}

    # --- the steps -----------------------------------------------------------------------------------------------------

    def _take(self, update: _Open, info: Any) -> None:
        if isinstance(info, list):
            # vLLM takes one for each rank, and there is one rank.
            if len(info) != 1:
                raise InvalidValue(f"update_info lists {len(info)} ranks; this server is one")
            info = info[0]
        if not isinstance(info, dict) or "directory" not in info:
            raise CapabilityMissing(
                "update_info names no directory, and tensors come by none else: {'directory': PATH}"
            )
        told = as_body(info, Directory)
        sent = self._read(told.directory)
        names = sent.tensors.keys() if told.names is None else {*told.names}
        if lacking := names - sent.tensors.keys():
            raise ModelError(f"{min(lacking)!r} is not in the directory")
        if twice := names & update.state.keys():
            raise ModelError(f"{min(twice)!r} was sent before in this update")
        update.state |= {name: sent.tensors[name] for name in names}
        update.manifest = sent.manifest if names == sent.tensors.keys() else None
        if checkpoint_state(self._loop.engine.model).keys() <= update.state.keys():
            update.staged = self._loop.engine.stage_weights(update.state, "pending")

    def _read(self, path: str) -> Sent:
        folder = CheckpointFolder(self._need_root(), path)
        try:
            known = self._loop.engine.model.state_dict()
            if folder.has_manifest:
                manifest = folder.manifest()
                return Sent(
                    {each.name: tensor_of(each, known) for each in folder.tensors(manifest)}, manifest
                )
            # As wide as doubles, and tied heads written out: no checkpoint of this model is larger.
            most = 2 * sum(8 * tensor.numel() for tensor in known.values())
            return Sent({each.name: tensor_of(each, known) for each in folder.plain_tensors(most)}, None)
        finally:
            folder.close()

    def _publish(
        self, tensors: Mapping[str, torch.Tensor], label: str | None, told: UpdateManifest | None, kv: str
    ) -> WeightVersion:
        updates = self._updates()
        if told is not None and label not in (None, told.version):
            raise VersionConflict(
                f"the directory says that it is {told.version!r}, and {label!r} was asked for"
            )
        weights = manifest_of(tensors)
        if told is None:
            label = label or _next_auto(updates)
            told = UpdateManifest(version=label, weights=weights, tied=ties_of(self._loop.engine.model))
        with updates.begin(msgspec.structs.replace(told, files=()), updates.current) as update:
            for name, tensor in tensors.items():
                update.push(name, tensor)
            update.verify()
            update.commit()
            return update.publish(kv)

    def _updates(self) -> Updates:
        """Versions are kept from the first update on: a server that takes none writes nothing."""
        if self._kept is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="zerodrift-serve-")
            self._kept = Updates(self._loop, Path(self._temporary.name) / "versions")
        return self._kept

    def _need_root(self) -> Path:
        if self._root is None:
            raise CapabilityMissing("this server was started without --weight-root DIR, and takes no weights")
        return self._root

    def _require_current(self, expect: str | None) -> None:
        if expect not in (None, (now := self._loop.engine.version).label, now.digest):
            raise VersionConflict(
                f"{expect!r} was expected to be current, and {now.label!r} ({now.digest}) is"
            )


def tensor_of(read: TensorBytes, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """In the engine's dtype, if that takes no rounding."""
    if (own := known.get(read.name)) is None:
        raise ModelError(f"the model that is served has no {read.name[:80]!r}; send a checkpoint of it")
    if read.stored.shape != tuple(own.shape):
        raise ModelError(
            f"the new {read.name} is {list(read.stored.shape)}, but the model has {list(own.shape)}"
        )
    dtype = getattr(torch, read.stored.dtype.name)
    content = bytearray(read.content)
    tensor = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    if dtype is not own.dtype and own.dtype not in _WIDER.get(dtype, ()):
        raise ModelError(
            f"the new {read.name} is {dtype}, and the server computes in {own.dtype}, which would round it; serve the model "
            "in the trainer's dtype (--dtype)"
        )
    return tensor.reshape(own.shape).to(own.dtype)


def _next_auto(updates: Updates) -> str:
    taken = {entry.version.label for entry in updates.entries}
    return next(label for number in range(1, len(taken) + 2) if (label := f"auto-{number}") not in taken)

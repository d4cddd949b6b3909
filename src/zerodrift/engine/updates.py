"""New weights as transactions: each is served whole and verified, or never.

    updates = Updates(loop, Path("runs/weights"))
    with updates.begin(update_of(model, "step 7"), expected="step 6") as update:
        for name, tensor in checkpoint_state(model).items():
            update.push(name, tensor)
        update.verify()
        update.commit()
        update.publish(kv="keep")

`commit` puts the weights on the disk, `publish` makes them current: first in the registry, then in the engine, both between
the same two steps. Whoever starts an engine over the directory again serves what the registry says.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch

from zerodrift.core import require
from zerodrift.core.errors import (
    DigestMismatch,
    InvalidValue,
    NotRetained,
    OutOfOrder,
    VersionConflict,
    ZerodriftError,
)
from zerodrift.core.version import WeightVersion
from zerodrift.engine.limits import KVPolicy
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.weights import StagedWeights, Staging
from zerodrift.weights.files import read_update, write_update
from zerodrift.weights.folder import make_kept, sweep
from zerodrift.weights.of_model import ties_of, whole_manifest
from zerodrift.weights.registry import Kind, Known, Registry, RegistryEntry
from zerodrift.weights.session import Stage, UpdateSession
from zerodrift.weights.update import UpdateManifest, check_update

log = logging.getLogger("zerodrift.weights")


class Updates:
    """The versions of one engine's weights: one process, one update at a time, any thread."""

    def __init__(
        self,
        loop: EngineLoop,
        directory: Path,
        *,
        retain: int = 4,
        decided: Callable[[str], bool] = lambda identity: False,
    ) -> None:
        """Go on where `directory` left off: its current version is put into the engine, whatever that started with.

        A directory that is new begins with the engine's own weights, under the engine's own label. The `retain` latest
        versions are kept on the disk, the current one and the one before it among them. `decided` is asked about a
        version that is on the disk and was never published: whether others count on it (`sync/decisions.py`).
        """
        require.instance(InvalidValue, "loop", loop, EngineLoop)
        require.whole(InvalidValue, "retain", retain, "the current version and the one before it are kept", 2)
        self._loop, self._retain, self._decided = loop, retain, decided
        self._registry = Registry(Path(directory))
        self._slot, self._taken = threading.Lock(), False
        self._under_way: WeightUpdate | None = None
        try:
            self._kept = make_kept(Path(directory))
            model = loop.engine.model
            self._own, self._ties = whole_manifest(model), ties_of(model)
            self._recover()
        except BaseException:
            self._registry.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the directory; the engine serves on."""
        self._registry.close()

    @property
    def current(self) -> WeightVersion:
        """The version that serves."""
        label = self._registry.versions.current
        assert label is not None, "recovery publishes one"
        return self._registry.versions.known[label].version

    @property
    def retained(self) -> tuple[WeightVersion, ...]:
        """Versions that can be rolled back to and replayed, in the order of their commits."""
        versions = self._registry.versions
        return tuple(versions.known[label].version for label in versions.kept)

    @property
    def entries(self) -> tuple[RegistryEntry, ...]:
        """All that was ever committed, published, aborted and forgotten here."""
        return self._registry.entries

    def published(self, update: UpdateManifest) -> bool:
        """Whether this very update was made: what to ask after an answer that was lost."""
        require.instance(InvalidValue, "update", update, UpdateManifest)
        known = self._registry.versions.known.get(update.version)
        return known is not None and known.was_current and known.manifest == update.identity

    def begin(self, update: UpdateManifest, expected: str | WeightVersion) -> "WeightUpdate":
        """Open an update of the `expected` version, which is current. While one is open no other is."""
        require.instance(InvalidValue, "update", update, UpdateManifest)
        check_update(update, self._own, self._ties)
        self._take_slot()
        try:
            self._require_current(expected)
            self._registry.versions.require_new(update.version, update.parent)
            opened = self._under_way = WeightUpdate(self, update, Staging(self._loop.engine.model))
        except BaseException:
            self._free_slot()
            raise
        return opened

    def abort(self) -> None:
        """End the update that is under way, whoever began it: a trainer that died left it open."""
        if (update := self._under_way) is None:
            raise OutOfOrder("no update is under way")
        update.abort()

    def from_directory(
        self,
        root: Path,
        name: str,
        expected: str | WeightVersion,
        *,
        digest: str | None = None,
        kv: str = "recompute",
    ) -> WeightVersion:
        """A whole update out of the directory `name` below `root`; with `digest`, of that very manifest alone."""
        require.one_of(KVPolicy, "kv", kv)
        with read_update(Path(root), name) as (manifest, tensors):
            if digest not in (None, manifest.digest):
                raise DigestMismatch(
                    f"the manifest of {name!r} has digest {manifest.digest}, and {digest} was announced"
                )
            with self.begin(manifest, expected) as update:
                for each, tensor in tensors:
                    update.push(each, tensor)
                update.verify()
                update.commit()
                return update.publish(kv)

    def rollback(
        self, expected: str | WeightVersion, *, to: str | None = None, kv: str = "recompute"
    ) -> WeightVersion:
        """Make a version that is kept current again: the one before, or `to`."""
        policy = require.one_of(KVPolicy, "kv", kv)
        self._take_slot()
        try:
            self._require_current(expected)
            known = self._registry.versions.to_go_back_to(to)
            version = self._switch(self._load(known), known.manifest, policy)
            self._forget_oldest()
            return version
        finally:
            self._free_slot()

    def weights_of(self, version: str | WeightVersion) -> StagedWeights:
        """The weights of a version that is kept, verified again; to replay what it made."""
        require.instance(InvalidValue, "version", version, str | WeightVersion)
        label = version if isinstance(version, str) else version.label
        known = self._registry.versions.require_kept(label)
        if isinstance(version, WeightVersion) and known.version != version:
            raise NotRetained(
                f"version {label!r} is kept with digest {known.version.digest}, not {version.digest}"
            )
        return self._load(known)

    def _load(self, known: Known) -> StagedWeights:
        with read_update(self._kept, known.manifest) as (manifest, tensors):
            if manifest.identity != known.manifest:
                raise DigestMismatch(
                    f"the weights of version {known.version.label!r} were exchanged on the disk; they are not used"
                )
            check_update(manifest, self._own, self._ties)
            session, staging = UpdateSession(manifest), Staging(self._loop.engine.model)
            for name, tensor in tensors:
                staging.put(session.expect(name), tensor)
                session.took(name)
        session.move(Stage.VERIFIED)
        return staging.finish(manifest.version)

    def _switch(self, staged: StagedWeights, manifest: str, policy: KVPolicy) -> WeightVersion:
        """Current in the registry, and then in the engine, between the same two steps."""
        follows = self._registry.versions.current

        def before() -> None:
            self._require_ours()
            self._registry.append(Kind.PUBLISHED, staged.version, manifest, follows=follows, kv=policy.value)

        return self._loop.swap_weights(staged, kv=policy, before=before)

    def _keep(self, update: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """On the disk first, and then in the registry: what it names is there."""
        identity = update.identity
        write_update(self._kept, identity, msgspec.structs.replace(update, files=()), tensors)
        try:
            self._registry.append(Kind.COMMITTED, update.weight_version, identity)
        except BaseException:
            shutil.rmtree(self._kept / identity, ignore_errors=True)
            raise

    def _drop(self, kind: Kind, label: str) -> None:
        """Out of the registry first: what is left on the disk then is swept away by the next start at the latest."""
        known = self._registry.versions.known[label]
        self._registry.append(kind, known.version, known.manifest)
        shutil.rmtree(self._kept / known.manifest, ignore_errors=True)

    def _dropped(self, kind: Kind, label: str) -> bool:
        """Or not, where a full disk takes no line: the next update, or start, tries again, and this one goes on."""
        try:
            self._drop(kind, label)
        except (ZerodriftError, OSError) as error:
            log.warning("version %r is kept for now, though it is one too many: %s", label, error)
            return False
        return True

    def _forget_oldest(self) -> None:
        """Room on the disk, and no part of any update."""
        versions = self._registry.versions
        spare = [label for label in versions.kept if label not in (versions.current, versions.previous)]
        for label in spare[: max(0, len(versions.kept) - self._retain)]:
            if not self._dropped(Kind.FORGOTTEN, label):
                return

    def _recover(self) -> None:
        versions = self._registry.versions
        if self._registry.begun:
            sweep(self._kept, {versions.known[label].manifest for label in versions.kept})
        if self._registry.versions.current is None:
            self._adopt()
        else:
            known = self._registry.versions.require_kept(self._registry.versions.current)
            self._loop.swap_weights(self._load(known))
        for label in self._registry.versions.kept:
            known = self._registry.versions.known[label]
            if not known.was_current and self._decided(known.manifest):
                self._switch(self._load(known), known.manifest, KVPolicy.RECOMPUTE)
            elif not known.was_current:  # and whoever was about to publish it is gone
                self._dropped(Kind.ABORTED, label)
        self._forget_oldest()

    def _adopt(self) -> None:
        """The weights that the engine started with are the first version."""
        staged = self._loop.retain_weights()
        first = UpdateManifest(version=staged.version.label, weights=self._own, tied=self._ties)
        known = self._registry.versions.known.get(first.version)
        if known is None or not known.kept:
            self._keep(first, staged.tensors)
        elif known.version != staged.version:
            raise VersionConflict(
                f"{self._kept.parent} was begun with other weights as {first.version!r}; remove it, or start with those"
            )
        self._registry.append(Kind.PUBLISHED, staged.version, first.identity)

    def _take_slot(self) -> None:
        with self._slot:
            if self._taken:
                raise VersionConflict(
                    "another update is under way; wait for its end, and look what is current then"
                )
            self._taken = True

    def _free_slot(self) -> None:
        self._taken, self._under_way = False, None

    def _require_current(self, expected: str | WeightVersion) -> None:
        require.instance(InvalidValue, "expected", expected, str | WeightVersion)
        self._require_ours()
        if expected not in (self.current, self.current.label):
            label = expected if isinstance(expected, str) else expected.label
            raise VersionConflict(
                f"{label!r} was expected to be current, and {self.current.label!r} with digest {self.current.digest} is"
            )

    def _require_ours(self) -> None:
        if (runs := self._loop.engine.version) != self.current:
            raise VersionConflict(
                f"the engine runs {runs.label!r} with digest {runs.digest}, by somebody else, and {self.current.label!r} was "
                f"published here; update it by one `Updates` alone, and make that of {self._kept.parent} anew to put its version back"
            )


class WeightUpdate:
    """One update under way. Leaving its `with` before it is published aborts it."""

    def __init__(self, updates: Updates, manifest: UpdateManifest, staging: Staging) -> None:
        """Made by `Updates.begin`."""
        self._updates, self._session, self._staging = updates, UpdateSession(manifest), staging
        self._staged: StagedWeights | None = None
        self._mutex, self._waits = threading.Lock(), False

    @property
    def stage(self) -> Stage:
        """How far it is."""
        return self._session.stage

    def push(self, name: str, tensor: torch.Tensor) -> None:
        """Take a copy of one tensor, with the very bits that the manifest promised. What is refused may come again."""
        with self._mutex:
            record = self._session.expect(name)
            self._staging.put(record, tensor)
            self._session.took(name)

    def verify(self) -> WeightVersion:
        """All came, all are finite, and so are the logits of a few tokens; or the update is over."""
        with self._mutex:
            self._session.require_next(Stage.VERIFIED)
            try:
                self._staged = self._staging.finish(self._session.update.version)
            except BaseException:
                self._end()
                raise
            self._session.move(Stage.VERIFIED)
            return self._staged.version

    def commit(self) -> None:
        """Put the weights on the disk: from here on the version can be published, and survives whatever happens."""
        with self._mutex:
            self._session.require_next(Stage.COMMITTED)
            self._updates._keep(self._session.update, self._verified().tensors)  # noqa: SLF001 (one idea, two classes)
            self._session.move(Stage.COMMITTED)

    def publish(self, kv: str = "recompute") -> WeightVersion:
        """Serve it from the next step on; with kv="drain", when all that is in flight has ended."""
        policy = require.one_of(KVPolicy, "kv", kv)
        with self._mutex:
            self._session.require_next(Stage.PUBLISHED)
            identity = self._session.update.identity
            self._waits = policy is KVPolicy.DRAIN
            try:
                version = self._updates._switch(self._verified(), identity, policy)  # noqa: SLF001
            finally:
                self._waits = False
            self._session.move(Stage.PUBLISHED)
            self._let_go()
            try:
                self._updates._forget_oldest()  # noqa: SLF001
            finally:
                self._updates._free_slot()  # noqa: SLF001
            return version

    def abort(self) -> None:
        """End it; the version that serves serves on."""
        if self._waits:
            raise OutOfOrder(
                "it is published when what is in flight has ended; resume the engine, or abort the requests"
            )
        with self._mutex:
            self._session.require_next(Stage.ABORTED)
            self._end()

    def _verified(self) -> StagedWeights:
        if self._staged is None:
            raise OutOfOrder(f"the update to {self._session.update.version!r} was never verified")
        return self._staged

    def _let_go(self) -> None:
        """Of a second model in memory: whoever keeps an update that is over keeps its manifest."""
        self._staged = None
        self._staging.drop()

    def _end(self) -> None:
        committed = self._session.stage is Stage.COMMITTED
        self._session.move(Stage.ABORTED)
        self._let_go()
        self._updates._free_slot()  # noqa: SLF001
        if committed:
            self._updates._drop(Kind.ABORTED, self._session.update.version)  # noqa: SLF001

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stage not in (Stage.PUBLISHED, Stage.ABORTED):
            self.abort()

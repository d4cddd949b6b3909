"""One update, message by message: which may come now, and what of it is still missing. Torch-free.

OPEN → VERIFIED → COMMITTED → PUBLISHED, and from the first three → ABORTED
"""

from collections.abc import Collection
from enum import StrEnum

from zerodrift.core.errors import OutOfOrder
from zerodrift.weights.manifest import TensorRecord
from zerodrift.weights.update import UpdateManifest, few


class Stage(StrEnum):
    """How far an update is."""

    OPEN = "open"
    VERIFIED = "verified"
    COMMITTED = "committed"
    PUBLISHED = "published"
    ABORTED = "aborted"


_NEXT = {
    Stage.OPEN: {Stage.VERIFIED, Stage.ABORTED},
    Stage.VERIFIED: {Stage.COMMITTED, Stage.ABORTED},
    Stage.COMMITTED: {Stage.PUBLISHED, Stage.ABORTED},
    Stage.PUBLISHED: set[Stage](),
    Stage.ABORTED: set[Stage](),
}


class UpdateSession:
    """What came of one update so far."""

    def __init__(self, update: UpdateManifest) -> None:
        """Opens with its manifest."""
        self.update = update
        self.stage = Stage.OPEN
        self._records = {record.name: record for record in update.weights.tensors}
        self._pushed: set[str] = set()

    @property
    def missing(self) -> Collection[str]:
        """Tensors that were promised and did not come yet."""
        return self._records.keys() - self._pushed

    def expect(self, name: object) -> TensorRecord:
        """What the tensor `name`, which comes now, has to be."""
        label = self.update.version
        if self.stage is not Stage.OPEN:
            raise OutOfOrder(
                f"a tensor came for the update to {label!r}, which is {self.stage}; begin another one"
            )
        if name in self._pushed:
            raise OutOfOrder(f"{name} was pushed before; a replayed message is refused")
        if not isinstance(name, str) or name not in self._records:
            tied = self.update.tied.get(name) if isinstance(name, str) else None
            why = f"it is tied to {tied}: push that" if tied else "it is not in the manifest"
            raise OutOfOrder(f"{str(name)[:80]!r} was pushed for the update to {label!r}, and {why}")
        return self._records[name]

    def took(self, name: str) -> None:
        """The tensor came, and was what it had to be."""
        self._pushed.add(name)

    def require_next(self, stage: Stage) -> None:
        """`stage` may come now, or it is refused by what is missing."""
        label = self.update.version
        if stage not in _NEXT[self.stage]:
            raise OutOfOrder(f"the update to {label!r} is {self.stage} and cannot become {stage} now")
        if stage is Stage.VERIFIED and self.missing:
            raise OutOfOrder(f"the update to {label!r} lacks {few(self.missing)}; push them first")

    def move(self, stage: Stage) -> None:
        """On to `stage`."""
        self.require_next(stage)
        self.stage = stage

"""A request that was answered wrongly, asked again: as small as it can be, or after the weights were pushed."""

from collections.abc import Sequence

from zerodrift.audit.observe import BATCH
from zerodrift.audit.reduce import Requests, reduce
from zerodrift.audit.replay import Replay
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import ZerodriftError
from zerodrift.core.request import Request
from zerodrift.drift.gates import Gates
from zerodrift.records.case import Case


class FailureReplay:
    """Request `index` of a plan, with those that were in flight beside it."""

    def __init__(
        self, engine: Backend, reference: ReferenceBackend, gates: Gates, plan: Sequence[Request], index: int
    ) -> None:
        first = index - index % BATCH
        beside = (each for each in plan[first : first + BATCH] if each != plan[index])
        self._requests: Requests = (plan[index], *beside)
        self._replay = Replay(engine, reference, gates.outlier)
        self._seeded = Capability.SEED in engine.capabilities

    def smallest(self) -> Case | None:
        """The request made as small as it can be without its answer becoming right; None where it is right."""
        if not self._seeded:
            return None
        try:
            requests = reduce(self._requests, self._replay.first_bad)
        except ZerodriftError:
            return None
        return None if requests is None else Case(requests=requests, limit=self._replay.limit)

    def is_right(self) -> bool:
        """Whether the engine answers the request rightly now."""
        try:
            replayed = self._replay(self._requests)
        except ZerodriftError:
            return False
        return replayed.measurement is not None and replayed.first_bad is None

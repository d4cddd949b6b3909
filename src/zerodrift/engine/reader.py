"""Whoever reads an engine by `generate` or `stream` reads it alone: what steps give is theirs, and nobody else's."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from zerodrift.core.errors import EngineError, ZerodriftError
from zerodrift.engine.scheduler import Scheduler


class ReadEngine(Protocol):
    """What a reader needs of the engine."""

    scheduler: Scheduler
    broken: ZerodriftError | None

    def owned(self) -> AbstractContextManager[None]: ...
    def abort(self, request_id: str) -> object: ...


class SoleReader:
    """At most one at a time."""

    def __init__(self) -> None:
        self._reading = False

    @contextmanager
    def reads(self, engine: ReadEngine) -> Iterator[None]:
        """What steps give is the caller's alone; when it is gone, nothing is computed for nobody."""
        self.require_none()
        with engine.owned():
            if engine.scheduler.requests:
                raise EngineError(
                    f"{len(engine.scheduler.requests)} requests are in flight, whose updates step() gives; take them "
                    "first, or share the engine through EngineLoop"
                )
            self._reading = True
        try:
            yield
        finally:
            self._reading = False
            for request_id in list(engine.scheduler.requests) if engine.broken is None else ():
                engine.abort(request_id)

    def require_none(self) -> None:
        """Nobody reads; or `EngineError`."""
        if self._reading:
            raise EngineError(
                "a stream of this engine is being read; read it to its end or close it first, or share the engine "
                "through EngineLoop"
            )

"""One request that was submitted to an engine loop: its updates as they come, its outputs, its end."""

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from zerodrift.core.errors import EngineError, ZerodriftError
from zerodrift.engine.latch import Latch
from zerodrift.engine.output import Output, SampleUpdate

OnUpdate = Callable[[SampleUpdate | BaseException], None]
"""Takes each update, or the error that ended the request."""
LOOK_AFTER_S = 1.0
"""A worker that was killed wakes nobody: whoever waits looks this often whether it lives."""


class Loop(Protocol):
    """What a request needs of the loop that serves it."""

    @property
    def alive(self) -> bool: ...
    def abort(self, request_id: str) -> None: ...
    def end_error(self) -> ZerodriftError: ...


class RequestHandle:
    """Iterate over its updates, or wait for its result: from any thread, in one thread each."""

    def __init__(self, loop: Loop, request_id: str, num_samples: int, on_update: OnUpdate | None) -> None:
        """Made by `EngineLoop.submit`."""
        self.request_id = request_id
        self._loop = loop
        self._num_samples = num_samples
        self._on_update = on_update
        self._updates: queue.SimpleQueue[SampleUpdate | None] = queue.SimpleQueue()
        self._outputs: list[Output] = []
        self._error: BaseException | None = None
        self._done = Latch()

    def __enter__(self) -> "RequestHandle":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.abort()

    def __iter__(self) -> "RequestHandle":
        return self

    def __next__(self) -> SampleUpdate:
        """The next update, when it comes."""
        if self._on_update is not None:
            raise EngineError(
                f"the updates of request {self.request_id!r} go to its on_update; take them there, or submit without it "
                "to iterate"
            )
        while True:
            try:
                update = self._updates.get(timeout=LOOK_AFTER_S)
            except queue.Empty:
                self._look_after_the_worker()
                continue
            if update is not None:
                return update
            self._updates.put(None)  # the end stays the end, whoever asks again
            if self._error is not None:
                raise self._error.with_traceback(None)
            raise StopIteration

    def result(self, timeout: float | None = None) -> list[Output]:
        """All outputs, in the order of sample indices; `TimeoutError` where they are not there in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done.is_set():
            left = LOOK_AFTER_S if deadline is None else min(LOOK_AFTER_S, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError(
                    f"request {self.request_id!r} is not finished after {timeout} s; it goes on"
                )
            if not self._done.wait(left):
                self._look_after_the_worker()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return sorted(self._outputs, key=lambda output: output.sample_index)

    @property
    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._done.is_set()

    def abort(self) -> None:
        """End it before the next step; nothing happens where it ended already."""
        if not self._done.is_set():
            try:
                self._loop.abort(self.request_id)
            except ZerodriftError:
                return  # it ended meanwhile

    def take(self, update: SampleUpdate) -> bool:
        """From the worker: one more update; True with the last, after which comes `end`."""
        if update.output is not None:
            self._outputs.append(update.output)
        if self._on_update is None:
            self._updates.put(update)
        else:
            self._on_update(update)
        return len(self._outputs) == self._num_samples

    def fail(self, error: BaseException) -> None:
        """From the worker: the request came to its end by an error."""
        self._error = error
        self.end()
        if self._on_update is not None:
            # One whose very callback fails cannot be told there; `result` raises the error all the same.
            with suppress(Exception):
                self._on_update(error)

    def end(self) -> None:
        """From the worker: nothing more comes."""
        self._done.set()
        self._updates.put(None)

    def _look_after_the_worker(self) -> None:
        if not self._loop.alive and not self._done.is_set():
            self._error = self._loop.end_error()
            self.end()

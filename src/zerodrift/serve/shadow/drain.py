"""Where it is asked for, no request lives to see another version: updates wait for requests, and requests for updates. Torch-free."""

import asyncio

from zerodrift.serve.errors import CallRefused
from zerodrift.serve.shadow.versions import EngineVersions, RequestPassage


class Drain:
    """Of one engine; without `on` everybody goes through at once."""

    def __init__(self, versions: EngineVersions, wait_s: float, *, on: bool) -> None:
        """`wait_s`: for what is in flight, before an update is refused."""
        self.on = on
        self._versions, self._wait_s = versions, wait_s
        self._draining = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self.look()

    async def admit(self) -> RequestPassage:
        """A request that generates, held for as long as weights change or the engine is paused."""
        # Whoever was woken looks again: the next update may have begun before its turn came.
        while self.on and not self._open.is_set():
            await self._open.wait()
        passage = self._versions.enter()
        self.look()
        return passage

    def leave(self, passage: RequestPassage) -> None:
        """Its answer has ended."""
        self._versions.leave(passage)
        self.look()

    async def empty(self) -> None:
        """Until nothing is in flight."""
        if not self.on:
            return
        self.hold()
        try:
            async with asyncio.timeout(self._wait_s):
                await self._idle.wait()
        except TimeoutError:
            raise CallRefused(
                409,
                f"{len(self._versions.alive)} requests were still in flight after {self._wait_s:g} s, and nothing was passed on; "
                "raise --drain-s, or go on without --drain-updates",
                code="update/not-drained",
            ) from None
        finally:
            self.let_go()

    def hold(self) -> None:
        """Nobody new, until `let_go`."""
        self._draining += 1
        self.look()

    def let_go(self) -> None:
        """Of one `hold`."""
        self._draining -= 1
        self.look()

    def look(self) -> None:
        """After anything changed in `versions`."""
        now = self._versions
        _set(self._open, is_so=not (self._draining or now.paused or now.changing))
        _set(self._idle, is_so=not now.alive)


def _set(event: asyncio.Event, *, is_so: bool) -> None:
    if is_so:
        event.set()
    else:
        event.clear()

"""One HTTP connection to the engine: a request in one write, and its answer event by event. Torch-free.

Our own, on h11, because it is in the way of every request: httpx2's transport took twice the time, and wrote head and body
apart, which wakes the engine twice.
"""

import asyncio
from typing import Any

import h11

HEAD_BYTES = 64 * 1024
"""Of an answer."""
HELD_BYTES = 1024 * 1024
"""That have come and were not taken yet; then nothing more is read, and the engine waits."""


class EngineConnection(asyncio.Protocol):
    """For one call after another."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        self._news: asyncio.Future[None] | None = None
        self._held = 0
        self._writing = False
        """Some of a request was not taken yet."""
        self._transport: Any = None
        self.idle_since = 0.0
        self.lost: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It can be written to."""
        self._transport = transport
        # Told of the first byte that is left to write, and of the last.
        self._transport.set_write_buffer_limits(0)

    def pause_writing(self) -> None:
        """The engine, and the system before it, take no more for now."""
        self._writing = True

    def resume_writing(self) -> None:
        """Nothing is left to write."""
        self._writing = False
        self._wake()

    def data_received(self, data: bytes) -> None:
        """Some of an answer."""
        self._http.receive_data(data)
        self._held += len(data)
        if self._held > HELD_BYTES:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """No more will come."""
        if self.lost is None:
            self.lost = exc or ConnectionError("the connection was closed")
            # A reset is no end: an answer that ends where its connection does would pass for whole.
            if exc is None:
                self._http.receive_data(b"")
        self._wake()

    def say(self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        """A whole request."""
        parts = [self._http.send(h11.Request(method=method, target=target, headers=headers))]
        if content:
            parts.append(self._http.send(h11.Data(data=content)))
        parts.append(self._http.send(h11.EndOfMessage()))
        self._transport.write(b"".join(part for part in parts if part))

    async def written(self) -> None:
        """Until nothing of the request is held here, or an answer comes before that."""
        while self._writing and not self._held and self.lost is None:
            await self._wait()

    async def event(self) -> h11.Event:
        """The next of an answer. h11.RemoteProtocolError where it is none, or ends before its end."""
        while True:
            found = self._http.next_event()
            if isinstance(found, h11.ConnectionClosed):
                raise h11.RemoteProtocolError("the connection was closed before an answer came")
            if found is not h11.NEED_DATA and found is not h11.PAUSED:
                assert isinstance(found, h11.Event), f"h11 gave {found!r}"
                return found
            if self.lost is not None:
                raise h11.RemoteProtocolError(f"the connection was lost: {self.lost}")
            if self._held > HELD_BYTES:
                self._transport.resume_reading()
            self._held = 0
            await self._wait()

    def again(self) -> bool:
        """Whether it is good for another call."""
        # What came behind the answer would be taken for the next one; what is left to write, for the next request.
        clean = self.lost is None and not self._writing and self._http.trailing_data == (b"", False)
        if clean and self._http.our_state is self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False

    @property
    def usable(self) -> bool:
        """Nothing has come since the last answer, not even its end."""
        return self.lost is None and not self._held and not self._transport.is_closing()

    def rest(self, now: float) -> None:
        """Nobody waits; what comes now belongs to no call, and is to be seen."""
        # An answer may have ended while more was held than is read ahead: nothing would ever be read again.
        self._transport.resume_reading()
        self._held, self.idle_since = 0, now

    def close(self) -> None:
        """At once, whatever was under way."""
        self._transport.abort()

    async def _wait(self) -> None:
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

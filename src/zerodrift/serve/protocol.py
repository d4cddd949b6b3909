"""HTTP on the wire: uvicorn's reader, with an end to waiting.

uvicorn waits for ever for the rest of a request line or of headers, and hands a client that reads nothing to the kernel.
Here the head of a request has ten seconds from the connection's first moment, and whoever answers may cut the line.
h11 bounds what it holds of an unfinished head (`HEADER_BYTES`); httptools, which is faster, does not.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from zerodrift.serve.limits import HEAD_S


class BoundedProtocol(H11Protocol):
    """One connection."""

    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, config: Any, *more: Any, **options: Any) -> None:
        """As uvicorn calls it, once for each connection."""
        super().__init__(config, *more, **options)
        # uvicorn would answer 503 to everybody, probes and trainers too, and clients send those again at once.
        self._most: int = config.limit_concurrency
        self.limit_concurrency = None

    def connection_made(self, transport: Any) -> None:
        """The clock starts."""
        super().connection_made(transport)
        if len(self.connections) > 2 * self._most:
            self.logger.warning("more than %d connections are open; another one was cut off", 2 * self._most)
            transport.abort()
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A head that is whole stops the clock, and the beginning of the next starts it."""
        super().data_received(data)
        if self._answering:
            self._stop_waiting()
        elif not self.transport.is_closing():
            self._wait_for_head()

    def handle_events(self) -> None:
        """What the application is told beside the call. The task that answers has not begun yet: tasks start when this has returned."""
        super().handle_events()
        if self._answering:
            more = {
                "zerodrift.abort": self.transport.abort,
                "zerodrift.crowded": len(self.connections) > self._most,
            }
            self.scope.update(more)  # type: ignore[typeddict-item]

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._answering or self.transport.is_closing():
            return
        self.logger.warning("a client did not send a whole request within %g s; it was cut off", HEAD_S)
        if self.conn.our_state is h11.IDLE:
            answer = h11.Response(
                status_code=408, headers=[(b"connection", b"close"), (b"content-length", b"0")]
            )
            self.transport.write(self.conn.send(answer) or b"")
            self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        self.transport.close()

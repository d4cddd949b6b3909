"""One call while it is answered, and what it is answered with. Torch-free."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from zerodrift.serve.routes import ServedRoute

JSON = "application/json"


class Call(NamedTuple):
    """A call that was let in and could be read."""

    route: ServedRoute
    body: Any
    """Of the type that the route names."""
    query: Any
    let_go: Callable[[], None] = lambda: None
    """What the body takes is counted by others from here on; at the latest when the call ends."""


class CallReply(NamedTuple):
    """A whole answer."""

    content: Any
    """Bytes as they are; all else as JSON."""
    status: int = 200
    media: str = JSON
    headers: Mapping[str, str] = {}

    @property
    def encoded(self) -> bytes:
        """As it is sent."""
        return self.content if isinstance(self.content, bytes) else msgspec.json.encode(self.content)


class EventStream(NamedTuple):
    """A stream of server-sent events."""

    pieces: AsyncIterator[bytes]


Handler = Callable[[Call], Awaitable[CallReply | EventStream]]


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"

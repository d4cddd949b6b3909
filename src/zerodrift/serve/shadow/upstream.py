"""The engine behind the proxy: one origin, no redirects, and every way to fail under a name. Torch-free.

Nothing is said twice and nothing is remembered: no retry, no cookie, no proxy of the environment.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import h11
import httpx2

from zerodrift.core.errors import ConfigError
from zerodrift.serve.shadow.wire import EngineConnection

CONNECT_S = 5.0
ANSWER_BYTES = 512 * 2**20
"""Of an answer that is no stream: ten million logprobs are 300 MB of JSON."""
# uvicorn drops idle connections after 5 s; letting go first avoids sending into a closing one.
IDLE_S = 2.0
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
Headers = Sequence[tuple[bytes, bytes]]


class UpstreamFailed(Exception):
    """No answer of the engine's."""

    def __init__(self, code: str, message: str, *, sent: bool) -> None:
        """`sent`: it may have got the call, and may have done what it asks."""
        super().__init__(message)
        self.code, self.sent = code, sent


class UpstreamAnswer(NamedTuple):
    """An answer whose head has come."""

    status: int
    headers: Headers
    """Without those that are of one connection alone."""
    pieces: AsyncIterator[bytes]
    """As they come."""

    def header(self, name: bytes) -> bytes:
        """The first of a name."""
        return next((value for found, value in self.headers if found.lower() == name), b"")

    @property
    def media(self) -> bytes:
        """What kind of document it is."""
        return self.header(b"content-type").partition(b";")[0].strip().lower()

    async def whole(self) -> bytes:
        """Its body, to the end."""
        content = bytearray()
        async for piece in self.pieces:
            content += piece
            if len(content) > ANSWER_BYTES:
                raise UpstreamFailed(
                    "upstream/too-large",
                    f"the engine answered with more than {ANSWER_BYTES} bytes",
                    sent=True,
                )
        return bytes(content)


class Upstream:
    """One engine. Only the event loop calls."""

    def __init__(self, url: str, key: str | None) -> None:
        """`key` is sent as its --api-key."""
        self._origin = origin_of(url)
        self.address = str(self._origin).rstrip("/")
        self._key = None if key is None else f"Bearer {key}".encode()
        self._secure = ssl.create_default_context() if self._origin.scheme == "https" else None
        self._idle: list[EngineConnection] = []

    def close(self) -> None:
        """Drop every connection."""
        while self._idle:
            self._idle.pop().close()

    @asynccontextmanager
    async def exchange(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        content: bytes,
        sent: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[UpstreamAnswer]:
        """One call, never said twice. `target` is a path, with its query; `sent` is called when `content` is not held here
        any more."""
        connection = await self._connection()
        ended = False
        try:
            connection.say(method, target, self._sent(headers, content), content)
            del content
            await connection.written()
            sent()
            head = await self._head(connection)
            if 300 <= head.status_code < 400:
                raise UpstreamFailed(
                    "upstream/redirect",
                    f"{self.address} redirects ({head.status_code}), which is not followed; give the address of the engine",
                    sent=True,
                )
            # Whoever answers says when.
            kept = [pair for pair in _kept(head.headers.raw_items()) if pair[0].lower() != b"date"]
            yield UpstreamAnswer(head.status_code, kept, self._pieces(connection))
            ended = connection.again()
        finally:
            if ended:
                connection.rest(time.monotonic())
                self._idle.append(connection)
            else:
                connection.close()

    async def _connection(self) -> EngineConnection:
        """The one that was used last, or a new one: there are no more than requests that were let in together."""
        now = time.monotonic()
        while self._idle:
            known = self._idle.pop()
            if known.usable and now - known.idle_since < IDLE_S:
                return known
            known.close()
        port = self._origin.port or (443 if self._secure else 80)
        try:
            async with asyncio.timeout(CONNECT_S):
                loop = asyncio.get_running_loop()
                _, made = await loop.create_connection(
                    EngineConnection, self._origin.host, port, ssl=self._secure
                )
        except (OSError, TimeoutError) as error:
            raise UpstreamFailed(
                "upstream/unreachable", f"no engine answers at {self.address} ({_words(error)})", sent=False
            ) from error
        return made

    async def _head(self, connection: EngineConnection) -> h11.Response:
        try:
            found = await connection.event()
            # 100 and 103: there is more to come.
            while isinstance(found, h11.InformationalResponse):
                found = await connection.event()
        except h11.RemoteProtocolError as error:
            raise self._broken(error) from error
        assert isinstance(found, h11.Response), f"{found!r} before the head of an answer"
        return found

    async def _pieces(self, connection: EngineConnection) -> AsyncIterator[bytes]:
        try:
            while isinstance(found := await connection.event(), h11.Data):
                yield bytes(found.data)
        except h11.RemoteProtocolError as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> UpstreamFailed:
        return UpstreamFailed(
            "upstream/broken",
            f"{self.address} ended the connection, or answered no HTTP ({_words(error)}); see its log",
            sent=True,
        )

    def _sent(self, headers: Headers, content: bytes) -> list[tuple[bytes, bytes]]:
        dropped = {b"host", b"content-length", b"expect"} | ({b"authorization"} if self._key else set())
        sent = [
            (b"host", self._origin.netloc),
            *(pair for pair in _kept(headers) if pair[0].lower() not in dropped),
        ]
        if content:
            sent.append((b"content-length", str(len(content)).encode()))
        if self._key is not None:
            sent.append((b"authorization", self._key))
        return sent


def origin_of(url: str) -> httpx2.URL:
    """http(s)://HOST[:PORT], and nothing more: the paths are those of the calls."""
    try:
        found = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"--shadow-of {url!r} is no address ({error}); give http://HOST:PORT") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise ConfigError(f"--shadow-of {url!r} is no address of an engine; give http://HOST:PORT")
    if found.userinfo:
        raise ConfigError(
            "--shadow-of holds a password; put the key into a variable and name it: --shadow-key-env NAME"
        )
    if found.path not in ("", "/") or found.query or found.fragment:
        raise ConfigError(f"--shadow-of {url!r} has a path; give the origin alone: http://HOST:PORT")
    return found


def _kept(headers: Headers) -> list[tuple[bytes, bytes]]:
    pairs = list(headers)
    named = {
        name.strip().lower()
        for key, value in pairs
        if key.lower() == b"connection"
        for name in value.split(b",")
    }
    return [(key, value) for key, value in pairs if key.lower() not in HOP_BY_HOP | named]


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__

"""The engine behind the proxy: one origin, no redirects, and every way to fail under a name. Torch-free.

The transport is called below the client that httpx2 puts on top of it: no cookie, no redirect, no proxy of the environment,
and half of the time of a call.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx2

from zerodrift.core.errors import ConfigError

CONNECT_S = 5.0
ANSWER_BYTES = 512 * 2**20
"""Of an answer that is no stream: ten million logprobs are 300 MB of JSON."""
# uvicorn drops idle connections after 5 s; letting go first avoids sending into a closing one.
IDLE_S = 2.0
_TIMEOUTS = {"connect": CONNECT_S, "read": None, "write": 60.0, "pool": None}
"""How long a call may take is for the caller to say."""
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
Headers = Sequence[tuple[bytes, bytes]]


class UpstreamFailed(Exception):
    """No answer of the engine's."""

    def __init__(self, code: str, message: str, *, sent: bool) -> None:
        """`sent`: it may have got the call, and may have done what it asks."""
        super().__init__(message)
        self.code, self.message, self.sent = code, message, sent


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

    def __init__(self, url: str, key: str | None, connections: int) -> None:
        """`key` is sent as its --api-key."""
        self._origin = origin_of(url)
        self.address = str(self._origin).rstrip("/")
        self._key = None if key is None else f"Bearer {key}".encode()
        self._host = self._origin.netloc
        self._plain: dict[bytes, httpx2.URL] = {}
        """Of calls without a query, which are few paths and most calls: to parse one takes 0.1 ms."""
        limits = httpx2.Limits(
            max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=IDLE_S
        )
        self._transport = httpx2.AsyncHTTPTransport(
            verify=self._origin.scheme == "https", limits=limits, trust_env=False
        )

    async def close(self) -> None:
        """Drop every connection."""
        await self._transport.aclose()

    @asynccontextmanager
    async def exchange(
        self, method: str, target: bytes, headers: Headers, content: bytes
    ) -> AsyncIterator[UpstreamAnswer]:
        """One call, never said twice. `target` is a path, with its query."""
        request = httpx2.Request(
            method,
            self._url(target),
            headers=self._sent(headers, content),
            content=content,
            extensions={"timeout": _TIMEOUTS},
        )
        try:
            response = await self._transport.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise UpstreamFailed(
                "upstream/unreachable",
                f"no engine answers at {self.address} ({_words(error)})",
                sent=False,
            ) from error
        except httpx2.TransportError as error:
            raise self._broken(error) from error
        try:
            if 300 <= response.status_code < 400:
                raise UpstreamFailed(
                    "upstream/redirect",
                    f"{self.address} redirects ({response.status_code}), which is not followed; give the address of the engine",
                    sent=True,
                )
            # Whoever answers says when.
            headers = [pair for pair in _kept(response.headers.raw) if pair[0].lower() != b"date"]
            yield UpstreamAnswer(response.status_code, headers, self._pieces(response))
        finally:
            await response.aclose()

    def _url(self, target: bytes) -> httpx2.URL:
        if (known := self._plain.get(target)) is not None:
            return known
        url = self._origin.copy_with(raw_path=target)
        if b"?" not in target:
            self._plain[target] = url
        return url

    async def _pieces(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        try:
            async for piece in response.aiter_raw():
                yield piece
        except httpx2.TransportError as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> UpstreamFailed:
        return UpstreamFailed(
            "upstream/broken",
            f"{self.address} ended the connection, or answered no HTTP ({_words(error)}); see its log",
            sent=True,
        )

    def _sent(self, headers: Headers, content: bytes) -> list[tuple[bytes, bytes]]:
        dropped = {b"host", b"content-length", b"expect"} | ({b"authorization"} if self._key else set())
        sent = [(b"host", self._host), *((n, v) for n, v in _kept(headers) if n.lower() not in dropped)]
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

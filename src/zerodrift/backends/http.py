"""How is an engine spoken to over HTTP, so that neither a vendor exception nor an endless wait gets past here?

Whatever goes wrong is one of our errors, with the server's own words: EngineUnreachable where nothing answers,
EngineRefused for 4xx, EngineError for 5xx, BadAnswer for what is not JSON or no stream of it. Only what is safe to say twice is said
twice: a GET, and any call answered with 429, which the server by its own account did not take up.
"""

import json
import math
import re
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import httpx2
import msgspec

from zerodrift.backends import sse
from zerodrift.core.errors import BadAnswer, ConfigError, EngineError, EngineRefused, EngineUnreachable

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_BYTES = 256 * 2**20
"""Of one answer: 10,000 tokens with 20 alternatives each are 20 MB of JSON."""
ATTEMPTS = 4
SHORTEST_S = 0.1
"""What an attempt is given, however late it begins: the shortest timeout that can be configured."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
"""A server that asks for more patience than this is reported, not waited for."""
REFUSALS = frozenset({400, 404, 405, 415, 422, 501})
"""What a server says of a request that it will never do. Any other failure is of the moment, the key or what is in
front of it, and says nothing of what the server can."""
CLOSED = frozenset({302, 303, 307, 401, 403})
"""Of a route beside the API, this is a gateway that keeps it to itself, or to those who log in."""


IN_LOG = "the cause is in the server's log"
_SECRETS = re.compile(r"[?#].*|(?<=//)[^/]*@", re.DOTALL)


class RefusalAdvice(NamedTuple):
    """What to type where a server refuses; whoever asks it has options of their own."""

    key: str = "put the server's --api-key into a variable and name it: --set engine.api_key_env=NAME"
    load: str = "send fewer requests together: --set engine.concurrency=N"
    log: Callable[[str], str] = str
    """Of the words that send one to the server's log makes what is written there, where the log is at hand."""


ADVICE = RefusalAdvice()


class Reply(NamedTuple):
    """What came back, whatever its status."""

    status: int
    body: bytes
    retry_after: str | None
    """Seconds to wait before asking again, in the server's words."""
    media: str = ""
    """What kind of document the body is."""
    location: str | None = None
    """Where a redirect leads."""

    @property
    def ok(self) -> bool:
        """The server did what was asked."""
        return 200 <= self.status < 300


class Stream(NamedTuple):
    """A stream of events, read to its end."""

    documents: list[Any]
    """Objects, as they came."""
    done: bool
    """It ended with [DONE]."""


class HttpClient:
    """One server, spoken to by as many threads as `concurrency` says."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        concurrency: int = 32,
        advice: RefusalAdvice = ADVICE,
    ) -> None:
        self._advice = advice
        self.address = _checked(url)
        """Without user, password or key: this is what messages show."""
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        headers = {"content-type": "application/json"}
        if api_key is not None:
            if httpx2.URL(url).userinfo:
                raise ConfigError(
                    "the address carries a password beside an API key, and only one can be sent"
                )
            headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx2.Client(
            base_url=url,
            headers=headers,
            timeout=timeout_s,
            # Plain HTTP has no certificate to check, and loading the trusted ones takes 0.17 s.
            verify=self.address.startswith("https:"),
            # uvicorn drops idle connections after 5 s; letting go first avoids sending into a closing one.
            limits=httpx2.Limits(
                max_connections=concurrency, max_keepalive_connections=concurrency, keepalive_expiry=2.0
            ),
            # Engines are reached directly: a proxy or .netrc from the environment would speak in their place.
            trust_env=False,
        )

    def get(self, path: str) -> object:
        """The JSON at `path`."""
        return self.read(path, self.exchange("GET", path))

    def find(self, path: str) -> object | None:
        """The JSON at `path`, or None where the server has no such route, or shows it to nobody from here.

        Gateways often let /v1 through and nothing else: that is no matter of the key, which /v1 has taken.
        """
        reply = self.exchange("GET", path)
        return None if reply.status in CLOSED | {404} else self.read(path, reply)

    def post(self, path: str, body: object) -> object:
        """The JSON that answers `body`; None where the answer is empty."""
        return self.read(path, self.exchange("POST", path, body))

    def can(self, path: str, body: object, cannot: Container[int]) -> bool:
        """Whether the server does what `body` asks; a failure that is not in `cannot` is none to conclude from, and raises."""
        reply = self.exchange("POST", path, body)
        if not reply.ok and reply.status not in cannot:
            raise _refusal(f"{self.address}{path}", reply, self._advice)
        return reply.ok

    def stream(self, path: str, body: object) -> Stream:
        """The events that answer `body`, all of them: what is compared in the end is the whole.

        Size and time are bounded as for any call, so a stream that never ends, or only trickles, raises.
        """
        where = f"{self.address}{path}"
        # llama.cpp promises to keep the connection and closes it behind a stream: the next call would run into that.
        reply = self.exchange("POST", path, body, {"connection": "close"})
        if not reply.ok:
            raise _refusal(where, reply, self._advice)
        if not reply.media.startswith(sse.MEDIA):
            raise BadAnswer(
                f"{where} was asked for a stream and answered {reply.media or 'something without a type'}: "
                f"{_excerpt(reply.body)!r}; it does not stream by this route"
            )
        events = sse.read(reply.body)
        if events.cut_off:
            raise EngineUnreachable(
                f"{where} broke a stream off in the middle of an event; {self._advice.log(IN_LOG)}"
            )
        data = events.data
        done = bool(data) and data[-1] == sse.DONE
        documents = [_event(where, each, self._advice) for each in (data[:-1] if done else data)]
        return Stream(documents, done)

    def each(self, call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """`call` on every item, `concurrency` at a time, results in order of `items`.

        At the first failure nothing new is sent; what is in flight is waited for, so that no request of ours
        loads the engine after this returns.
        """
        if not items:
            return []
        with ThreadPoolExecutor(min(self.concurrency, len(items))) as pool:
            futures = [pool.submit(call, item) for item in items]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                failed = [future for future in futures if future.done() and future.exception() is not None]
                return [future.result() for future in failed or futures]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def exchange(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One call with its bounded retries; any status is returned, and only silence raises."""
        deadline = time.monotonic() + self.timeout_s
        content = None if body is None else msgspec.json.encode(body)
        for attempt in range(ATTEMPTS):
            pause_s = FIRST_PAUSE_S * 2**attempt
            last = attempt == ATTEMPTS - 1
            try:
                reply = self._once(method, path, content, deadline, headers)
            except EngineUnreachable:
                if last or method != "GET" or time.monotonic() + pause_s > deadline:
                    raise
            else:
                pause_s = _asked_pause_s(reply.retry_after, pause_s)
                patient = pause_s <= LONGEST_PAUSE_S and time.monotonic() + pause_s <= deadline
                if reply.status != 429 or last or not patient:
                    return reply
            time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def read(self, path: str, reply: Reply) -> object:
        """The JSON of a successful reply; everything else raises."""
        where = f"{self.address}{path}"
        if not reply.ok:
            raise _refusal(where, reply, self._advice)
        return _parsed(f"{where} answered {reply.status}", reply.body) if reply.body else None

    def close(self) -> None:
        """Drop every connection. Safe to call twice."""
        self._client.close()

    def _once(
        self,
        method: str,
        path: str,
        content: bytes | None,
        deadline: float,
        headers: Mapping[str, str] | None,
    ) -> Reply:
        chunks, size = [], 0
        # The whole timeout again would let a server that is busy, and then hangs, take it twice.
        left_s = max(SHORTEST_S, deadline - time.monotonic())
        with (
            self._ours(path),
            self._client.stream(method, path, content=content, headers=headers, timeout=left_s) as response,
        ):
            for chunk in response.iter_bytes():
                chunks.append(chunk)
                size += len(chunk)
                if size > MOST_BYTES:
                    raise BadAnswer(
                        f"{self.address}{path} sent more than {MOST_BYTES // 2**20} MiB; "
                        "ask for fewer tokens or logprobs at once"
                    )
                # The client's own timeout starts anew with every byte: a trickle would never end.
                if time.monotonic() > deadline:
                    raise EngineUnreachable(
                        f"{self.address}{path} was still sending after {self.timeout_s:g} s; raise the timeout, "
                        "or ask for fewer tokens or logprobs at once"
                    )
            if response.status_code >= 500 and (stream := response.extensions.get("network_stream")):
                # uvicorn hangs up after an error that it did not expect, and says so nowhere: what is sent next
                # on this connection would be lost, and may not be sent twice.
                stream.close()
            told = response.headers
            return Reply(
                response.status_code,
                b"".join(chunks),
                told.get("retry-after"),
                told.get("content-type", ""),
                told.get("location"),
            )

    @contextmanager
    def _ours(self, path: str) -> Iterator[None]:
        """Vendor exceptions become EngineUnreachable; the last three are what its lower layers let through."""
        where = f"{self.address}{path}"
        try:
            yield
        except httpx2.TimeoutException as error:
            raise EngineUnreachable(
                f"{where} did not answer within {self.timeout_s:g} s; is it overloaded, or stuck?"
            ) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, RuntimeError) as error:
            look = self._advice.log("check that the server runs, and its log")
            raise EngineUnreachable(
                f"{where} cannot be reached or broke off ({type(error).__name__}: {error}); {look}"
            ) from error


def _checked(url: str) -> str:
    """`url` without credentials, if it can be the address of a server at all."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise EngineUnreachable(
            f"the server's address cannot be read ({error}); write http://HOST:PORT"
        ) from error
    shown = str(parsed.copy_with(username=None, password=None)).rstrip("/")
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > 65535:
        raise EngineUnreachable(f"{shown!r} is no address of a server; write http://HOST:PORT")
    return shown


def _asked_pause_s(retry_after: str | None, otherwise_s: float) -> float:
    try:
        asked = float(retry_after or "")
    except ValueError:  # absent, or a date
        return otherwise_s
    return asked if math.isfinite(asked) and asked >= 0 else otherwise_s


def _parsed(happened: str, body: bytes) -> object:
    try:
        # The standard parser reads NaN and Infinity, which some servers write: the sample that carries one
        # is then reported by itself, instead of the whole answer as garbage.
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(
            f"{happened} with {_excerpt(body)!r}, which is not JSON ({error}); "
            "is this the engine itself, or something in front of it?"
        ) from error


def _event(where: str, data: str, advice: RefusalAdvice) -> dict[str, Any]:
    """One event; servers report inside a stream what went wrong after its status was sent."""
    body = data.encode()
    document = _parsed(f"{where} streamed an event", body)
    if not isinstance(document, dict):
        raise BadAnswer(f"{where} streamed an event with {_excerpt(body)!r}, which is no object")
    if (error := document.get("error")) is None:
        return document
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and 400 <= code < 600:
        raise _refusal(where, Reply(code, body, None), advice)
    raise EngineError(f"{where} ended a stream with an error ({_words(body)}); {advice.log(IN_LOG)}")


def not_declined(call: Callable[[], bool]) -> bool:
    """What `call` finds; False where the server cannot: it refuses the request itself, or answers something else."""
    try:
        return call()
    except EngineError as error:
        if isinstance(error, BadAnswer) or error.status in REFUSALS:
            return False
        raise


def _refusal(where: str, reply: Reply, advice: RefusalAdvice) -> EngineError:
    error = _redirect(where, reply) if 300 <= reply.status < 400 else _named(where, reply, advice)
    error.status = reply.status
    return error


def _named(where: str, reply: Reply, advice: RefusalAdvice) -> EngineError:
    words = _words(reply.body)
    if reply.status in (401, 403):
        return EngineRefused(f"{where} refused the key ({reply.status}: {words}); {advice.key}")
    if reply.status == 404:
        return EngineRefused(
            f"{where} does not exist there (404: {words}); check the address and the model's name"
        )
    if reply.status == 429:
        asked = _asked(reply.retry_after) or "stayed so; "
        return EngineRefused(f"{where} is overloaded (429: {words}), {asked}{advice.load}")
    if reply.status in (502, 503, 504):
        return EngineUnreachable(
            f"{where} has no engine behind it now ({reply.status}: {words}); {advice.log(IN_LOG)}"
        )
    if reply.status >= 500:
        return EngineError(f"{where} failed ({reply.status}: {words}); {advice.log(IN_LOG)}")
    return EngineRefused(f"{where} refused the call ({reply.status}: {words})")


def _redirect(where: str, reply: Reply) -> EngineRefused:
    """It is not followed: the key would go along. Of its place neither a password nor what is behind a `?` is shown."""
    if place := _SECRETS.sub("", reply.location or "")[:300]:
        return EngineRefused(
            f"{where} redirects ({reply.status}) to {place}, which is not followed; give the address of the server itself"
        )
    return EngineRefused(
        f"{where} redirects ({reply.status}: {_words(reply.body)}) without saying where to; "
        "is this the engine itself, or something in front of it?"
    )


def _asked(retry_after: str | None) -> str:
    """How long the server asks to be left alone: seconds, or until a date. Anything else says nothing."""
    seconds = _asked_pause_s(retry_after, math.nan)
    if math.isfinite(seconds):
        return f"asks to wait {seconds:g} s; "
    return f"asks to wait until {retry_after[:60]}; " if retry_after and ":" in retry_after else ""


def _words(body: bytes) -> str:
    """The server's message, from the shapes that servers use: {"error": {"message"}}, {"error"}, {"detail"}."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return _excerpt(body)
    for key in ("error", "detail", "message"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return answer if isinstance(answer, str) else _excerpt(body)


def _excerpt(body: bytes) -> str:
    return body[:300].decode(errors="replace")

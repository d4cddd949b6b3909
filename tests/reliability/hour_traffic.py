"""What clients do to a server for an hour: ask, stream, leave, read slowly, and ask for what is refused. Torch-free."""

import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import urlsplit

MODEL = "testbed:qwen3"
MOST_WAITING = 64
MEAN_PAUSE_S = 4.0
"""Between the requests of one client: about half a core, server and checker together."""
SLOW_S = 0.15
JSON = {"content-type": "application/json"}


class Span(NamedTuple):
    """Tokens [start, end) are of these weights, as an answer says."""

    label: str
    digest: str
    start: int
    end: int


class Told(NamedTuple):
    """One sample, as a client has it; or a sequence that was scored, whose tokens are then its prompt."""

    kind: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    spans: list[Span]
    """Empty where the client left before anybody said."""
    sampling: dict[str, Any]
    index: int = 0
    labels: tuple[str, ...] = ()
    """Versions that were current while it ran; for one that was left."""
    adapter: dict[str, str] | None = None


class WrongAnswer(Exception):
    """A server did what it must not: lost tokens, another status, a broken stream."""


class Client:
    """One connection per request, as a client behind a balancer has it."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._port = urlsplit(url).port
        self._headers = JSON if token is None else {**JSON, "authorization": f"Bearer {token}"}

    def open(self, path: str, body: Any = None, *, method: str = "POST", small: bool = False) -> Any:
        """(connection, answer); `small`: with a receive buffer that holds little."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        if small:
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.settimeout(300)
            raw.connect(("127.0.0.1", self._port))
            connection.sock = raw
        connection.request(method, path, None if body is None else json.dumps(body), self._headers)
        return connection, connection.getresponse()

    def ask(self, path: str, body: Any = None, *, method: str = "POST") -> tuple[int, Any, dict[str, str]]:
        """Status, JSON or text, headers."""
        connection, answer = self.open(path, body, method=method)
        try:
            content = answer.read()
        finally:
            answer.close()
            connection.close()
        told = content.decode()
        kind = answer.getheader("content-type", "")
        return answer.status, json.loads(told) if "json" in kind else told, dict(answer.getheaders())


def spans_of(choice: dict[str, Any]) -> list[Span]:
    return [
        Span(each["version"], each["digest"], each["start"], each["end"])
        for each in choice["weight_versions"]
    ]


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    told = choice["logprobs"]
    return (
        told["token_logprobs"] if "token_logprobs" in told else [each["logprob"] for each in told["content"]]
    )


class Asker(threading.Thread):
    """Asks again and again, each time something else; what came goes into `told`."""

    def __init__(
        self,
        url: str,
        number: int,
        told: "SimpleQueue[Told]",
        counts: Counter[str],
        labels: Callable[[], list[str]],
        over: threading.Event,
        problems: list[str],
    ) -> None:
        super().__init__(daemon=True)
        self._client, self._draw = Client(url), random.Random(number)
        self._told, self._counts, self._labels, self._over = told, counts, labels, over
        self._problems = problems

    def run(self) -> None:
        kinds = [self._completion, self._chat, self._generate, self._stream, self._stream_generate, self._score,
                 self._left, self._slow, self._refused, self._beyond]  # fmt: skip
        weights = [4, 2, 4, 4, 2, 2, 2, 1, 1, 1]
        while not self._over.is_set():
            [kind] = self._draw.choices(kinds, weights)
            try:
                kind()
            except Exception as error:  # the hour goes on, and ends with all that went wrong
                self._problems.append(repr(error))
            self._over.wait(self._draw.expovariate(1 / MEAN_PAUSE_S))

    # --- what is asked ---------------------------------------------------------------------------------------------

    def _prompt(self) -> list[int]:
        # A third begin alike, so that prefixes are found.
        begin = [7, 7, 9, 11] * 5 if self._draw.random() < 0.33 else []
        return begin + [self._draw.randrange(4, 500) for _ in range(self._draw.randrange(1, 40))]

    def _sampling(self) -> dict[str, Any]:
        return {
            "seed": self._draw.randrange(2**31),
            "max_tokens": self._draw.randrange(4, 96),
            "temperature": self._draw.choice([1.0, 1.0, 0.7]),
            "ignore_eos": True,
        }

    def _completion(self) -> None:
        prompt, sampling, n = self._prompt(), self._sampling(), self._draw.choice([1, 1, 3])
        body = {"prompt": prompt, "n": n, "logprobs": 0, "return_token_ids": True, **sampling}
        self._whole("completion", "/v1/completions", body, prompt, {**sampling, "n": n})

    def _chat(self) -> None:
        sampling = self._sampling()
        text = "".join(self._draw.choice("0123456789+-= ab") for _ in range(self._draw.randrange(1, 30)))
        body = {
            "messages": [{"role": "user", "content": text}],
            "logprobs": True,
            "return_token_ids": True,
            **sampling,
        }
        self._whole("chat", "/v1/chat/completions", body, None, sampling)

    def _generate(self) -> None:
        prompt, sampling = self._prompt(), self._sampling()
        body = {"token_ids": prompt, "sampling_params": {**sampling, "logprobs": 0}}
        self._whole("generate", "/inference/v1/generate", body, prompt, sampling)

    def _whole(self, kind: str, path: str, body: Any, prompt: Any, sampling: dict[str, Any]) -> None:
        status, answer, headers = self._client.ask(path, body)
        if self._came_again(status, headers, answer):
            return
        for choice in answer["choices"]:
            ids = prompt or answer["prompt_token_ids"]
            self._take(
                kind,
                ids,
                choice["token_ids"],
                logprobs_of(choice),
                spans_of(choice),
                sampling,
                choice["index"],
            )

    def _stream(self, kind: str = "stream", *, slowly: bool = False) -> None:
        prompt, sampling = self._prompt(), self._sampling()
        body = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, "stream": True, **sampling}
        self._streamed(kind, "/v1/completions", body, prompt, sampling, slowly=slowly)

    def _stream_generate(self) -> None:
        prompt, sampling = self._prompt(), self._sampling()
        body = {"token_ids": prompt, "sampling_params": {**sampling, "logprobs": 0}, "stream": True}
        self._streamed("stream generate", "/inference/v1/generate", body, prompt, sampling)

    def _slow(self) -> None:
        self._stream("slow reader", slowly=True)

    def _left(self) -> None:
        """A stream whose client goes after some events, in the middle of a token if need be."""
        prompt, sampling = self._prompt(), {**self._sampling(), "max_tokens": 128}
        body = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, "stream": True, **sampling}
        most = self._draw.randrange(0, 12)
        self._streamed("left", "/v1/completions", body, prompt, sampling, most=most)

    def _score(self) -> None:
        sequences = [[*self._prompt(), 5] for _ in range(self._draw.randrange(1, 3))]
        status, answer, headers = self._client.ask("/v1/token_logprobs", {"token_ids": sequences})
        if self._came_again(status, headers, answer):
            return
        for ids, row in zip(sequences, answer["data"], strict=True):
            self._take("score", ids, [], row["logprobs"], spans_of(row), {})

    def _refused(self) -> None:
        path, body, expected = self._draw.choice(
            [
                ("/v1/completions", {"prompt": [1], "no_such_field": 1}, {400}),
                ("/v1/completions", {"prompt": [1], "model": "another"}, {404}),
                ("/v1/completions", {"prompt": [10**6], "max_tokens": 1}, {400}),
                ("/v1/completions", {"prompt": [5] * 5000}, {400}),
                (
                    "/v1/chat/completions",
                    {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
                    {400},
                ),
                ("/pause", None, {401}),
                ("/update_weights", {"weight_dir": "/etc"}, {401}),
                ("/no/such/route", {}, {404}),
            ]
        )
        status, _, _ = self._client.ask(path, body)
        if status not in expected:
            raise WrongAnswer(f"{path} {str(body)[:80]} answered {status}, and {expected} was expected")
        self._counts["refused"] += 1

    def _beyond(self) -> None:
        """More than may wait: 429, and nothing of it is queued."""
        status, answer, headers = self._client.ask(
            "/v1/completions", {"prompt": [[5]] * (MOST_WAITING + 1), "max_tokens": 1}
        )
        if not self._came_again(status, headers, answer):
            raise WrongAnswer(f"{MOST_WAITING + 1} prompts were taken by a queue of {MOST_WAITING}")

    # --- what came -------------------------------------------------------------------------------------------------

    def _streamed(
        self,
        kind: str,
        path: str,
        body: Any,
        prompt: Any,
        sampling: Any,
        *,
        most: int | None = None,
        slowly: bool = False,
    ) -> None:
        before = self._labels()
        connection, answer = self._client.open(path, body, small=slowly)
        tokens: list[int] = []
        logprobs: list[float] = []
        spans: list[Span] = []
        ended = events = 0
        try:
            if answer.status != 200:
                told = json.loads(answer.read())
                self._came_again(answer.status, dict(answer.getheaders()), told)
                return
            while (most is None or events < most) and (line := answer.readline()):
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    ended += line.strip() == b"data: [DONE]"
                    continue
                events += 1
                event = json.loads(line[6:])
                if "error" in event:
                    raise WrongAnswer(f"a stream told of {event['error']}")
                [choice] = event["choices"]
                tokens += choice["token_ids"]
                logprobs += logprobs_of(choice)
                spans = spans_of(choice) if choice["finish_reason"] else spans
                if slowly:
                    time.sleep(SLOW_S)
        finally:
            answer.close()
            connection.close()
        if most is None and ended != 1:
            raise WrongAnswer(f"a stream ended with {ended} [DONE]")
        if spans:
            self._take(kind, prompt, tokens, logprobs, spans, sampling)
        elif most is None:
            raise WrongAnswer("a stream ended without weight_versions")
        else:
            labels = tuple(dict.fromkeys([*before[-1:], *self._labels()[len(before) - 1 :]]))
            self._counts[kind] += 1
            self._told.put(Told(kind, prompt, tokens, logprobs, [], sampling, labels=labels))

    def _came_again(self, status: int, headers: dict[str, str], answer: Any) -> bool:
        """Whether it was told to come again; any other refusal is wrong."""
        if status == 429:
            if "retry-after" not in {name.lower() for name in headers}:
                raise WrongAnswer("429 without Retry-After")
            self._counts["429"] += 1
            return True
        if status != 200:
            raise WrongAnswer(f"{status}: {str(answer)[:300]}")
        return False

    def _take(
        self,
        kind: str,
        prompt: Any,
        tokens: Any,
        logprobs: Any,
        spans: list[Span],
        sampling: Any,
        index: int = 0,
    ) -> None:
        if kind != "score" and not len(tokens) == len(logprobs) == sampling["max_tokens"]:
            raise WrongAnswer(
                f"{kind}: {len(tokens)} tokens of {sampling['max_tokens']}, {len(logprobs)} logprobs"
            )
        self._counts[kind] += 1
        self._told.put(Told(kind, prompt, tokens, logprobs, spans, sampling, index))

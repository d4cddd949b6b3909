"""What every adapter of a running server does alike: ask in parallel, refuse what cannot be asked, bind samples.

An adapter adds what one call looks like and how its answer is read. What the server can do is found by asking it when
we connect, never by its version string: forks, back-ports and flags all lie there. A capability is what was seen to work,
and nothing that is asked for that changes the server.
"""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec

from zerodrift.backends.base import Backend, Capability, need
from zerodrift.backends.http import ADVICE, HttpClient, RefusalAdvice, not_declined
from zerodrift.backends.samples import ToldSample, bind_samples, parse, value_at
from zerodrift.backends.stream_deltas import Joined, Streaming, has_tokens, join
from zerodrift.core.completion import Answer
from zerodrift.core.errors import (
    CapabilityMissing,
    EngineRefused,
    InvalidPrompt,
    InvalidSampling,
    ModelNotFound,
)
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.models import directory as model_directory

UNKNOWN = WeightVersion("unknown")
MODELS = "/v1/models"
ALWAYS_SENT = ("temperature", "max_tokens", "seed", "n", "logprobs")
"""What every trainer states; the rest is left to the server's defaults unless it was asked for."""
REFUSED = (400, 422)
"""What is said of nonsense by a server that reads the field."""


class ModelCard(msgspec.Struct):
    """One model, as /v1/models lists it."""

    id: str
    max_model_len: int | None = None
    parent: str | None = None
    """Of an adapter: its base model."""
    root: str | None = None
    """Where the server has it from."""


class ServerBackend(Backend):
    """One model of one server. A request is one HTTP call, or one for each sample; the server makes the batches."""

    model: str
    hints: ClassVar[Mapping[Capability, str]]
    """What to type where a capability is missing."""
    cannot: ClassVar[Mapping[str, str]] = {}
    """Sampling parameter to the reason why it is refused: servers ignore fields that they do not know."""
    path: str
    """The route that generates."""
    streaming: Streaming
    label_route: ClassVar[str]
    """What shows the label of the weights, where `_has_label`."""
    _has_label = False
    _digest: str
    """Of the server that we connected to."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        concurrency: int = 32,
        advice: RefusalAdvice = ADVICE,
    ) -> None:
        """Connect, and find out what the server can do; `model` None takes the one that the server serves."""
        # OpenAI clients are given the address with /v1, so people paste it so.
        address = url.rstrip("/").removesuffix("/v1")
        self._http = HttpClient(
            address, api_key=api_key, timeout_s=timeout_s, concurrency=concurrency, advice=advice
        )
        try:
            self._connect(model)
            found = self._probe()
            self.capabilities = frozenset(capability for capability, present in found.items() if present)
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """All requests in flight together, `concurrency` at a time. `sampling` is reported as it was asked for."""
        return self._ask(requests, lambda request: Joined(self.complete(request), deltas=0))

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        """All streams open together, `concurrency` at a time."""
        self._need(Capability.STREAM)
        return self._ask(
            requests,
            lambda request: join(
                self._http.stream(self.path, {**self.body(request), **self.streaming.ask}),
                self.streaming,
                self.path,
            ),
        )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprobs, as the server makes them of a prompt that it does not go on with."""
        self._need(Capability.SCORE)
        prompts = [Prompt(tuple(sequence)) for sequence in sequences]
        for prompt in prompts:
            self._check_length(len(prompt.token_ids), 1)
        return self._http.each(self.score_one, [prompt.token_ids for prompt in prompts])

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """Have the server read `directory` itself, under the label `version` where it keeps one.

        It is looked at here first: servers read pickles where they find nothing better, and vLLM, which has no
        rollback, dies of a directory that it cannot read.
        """
        self._need(Capability.LOAD_WEIGHTS)
        directory = directory.resolve()
        if not directory.is_dir():
            raise ModelNotFound(f"{directory} is no directory; the engine would die of reading it")
        model_directory.check(directory)
        self.push_weights(directory, version)

    def close(self) -> None:
        """The server is not ours and runs on. Safe to call twice."""
        self._http.close()

    def complete(self, request: Request) -> object | None:
        """The answer to one call, as it came."""
        return self._http.post(self.path, self.body(request))

    @abstractmethod
    def body(self, request: Request) -> dict[str, Any]:
        """The JSON of one call."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As the server does for a plain prompt, special tokens included."""
        return self.render_chat([])

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """As the server does for chat."""
        return self._not_ours(Capability.TOKENIZE)

    def reset_cache(self) -> None:
        """Only an idle server can."""
        self._not_ours(Capability.RESET_CACHE)

    def score_one(self, token_ids: tuple[int, ...]) -> list[float]:
        """Raw logprobs of one sequence, but its first token."""
        return self._not_ours(Capability.SCORE)

    def push_weights(self, directory: Path, version: WeightVersion) -> None:
        """As `load_weights`, of a directory that was looked at."""
        self._not_ours(Capability.LOAD_WEIGHTS)

    def _not_ours(self, capability: Capability) -> NoReturn:
        self._need(capability)
        raise AssertionError(f"{self.name} claims to {capability}, and does not say how")

    @abstractmethod
    def _connect(self, model: str | None) -> None:
        """Which model it is, how long a sequence may be, and who computes."""

    @abstractmethod
    def _probe(self) -> dict[Capability, bool]:
        """What was seen to work; a server without ids or logprobs is refused."""

    @abstractmethod
    def _numbered(self, answers: Sequence[object], request: Request) -> list[tuple[int, Any]]:
        """The samples in the answers to the calls that one request became, by their index, whatever is in them."""

    @abstractmethod
    def _sample(self, raw: Any, request: Request, version: WeightVersion) -> ToldSample:
        """One of them; `version` is what the server said it had before and after the calls."""

    def _calls(self, request: Request) -> list[Request]:
        return [request]

    def _version(self) -> WeightVersion:
        if not self._has_label:
            return UNKNOWN
        label = value_at(self._http.get(self.label_route), "weight_version", str, self.label_route)
        return WeightVersion(label) if label else UNKNOWN

    def _ask(self, requests: Sequence[Request], call: Callable[[Request], Joined]) -> list[Answer]:
        for request in requests:
            self._check(request)
        before = self._version()
        calls = [self._calls(request) for request in requests]
        came = iter(self._http.each(call, [each for group in calls for each in group]))
        # A label that moved in between belongs to some of these tokens, and nobody can say to which.
        version = before if self._version() == before else UNKNOWN
        answers = []
        for request, group in zip(requests, calls, strict=True):
            parts = list(itertools.islice(came, len(group)))
            whole = self._read([part.answer for part in parts], request, version)
            answers.append(msgspec.structs.replace(whole, stream_deltas=sum(part.deltas for part in parts)))
        return answers

    def _read(self, answers: Sequence[object], request: Request, version: WeightVersion) -> Answer:
        return bind_samples(
            self._numbered(answers, request),
            request,
            self.path,
            lambda raw: self._sample(raw, request, version),
            self._digest,
        )

    def _choose(self, wanted: str | None) -> list[ModelCard]:
        """All models of the server, if it has the one that is wanted."""
        cards = value_at(self._http.get(MODELS), "data", list[ModelCard], MODELS)
        if wanted is not None and wanted not in (names := [card.id for card in cards]):
            raise EngineRefused(f"{self._http.address} serves {names}, not {wanted!r}; name one of those")
        return cards

    def _only(self, cards: Sequence[ModelCard]) -> str:
        if len(cards) != 1:
            names = [card.id for card in cards]
            raise EngineRefused(
                f"{self._http.address} serves {names}; say which one is audited: --set engine.served_model=NAME"
            )
        return cards[0].id

    def _shown(self, *routes: str) -> dict[str, object]:
        """All that the server shows of itself, as one document; of a name that is shown twice the last counts."""
        document: dict[str, object] = {}
        for route in routes:
            document |= parse(self._http.get(route), dict[str, object], route)
        return document

    def _check(self, request: Request) -> None:
        """What the server would ignore or cut down in silence is refused before it is sent."""
        sampling = request.sampling
        for name in changed(sampling) & self.cannot.keys():
            raise CapabilityMissing(f"{self.name} cannot {name} as it is meant here: {self.cannot[name]}")
        self._check_length(len(request.prompt.token_ids), sampling.max_tokens)
        for capability, asked_for in (
            (Capability.SEED, sampling.seed is not None),
            (Capability.CACHE_SALT, request.prompt.cache_salt is not None),
            (Capability.TOP_LOGPROBS, bool(sampling.logprobs)),
            (Capability.SCORE, sampling.prompt_logprobs is not None),
        ):
            if asked_for:
                self._need(capability)

    def _check_numbers(self, sampling: SamplingParams, largest_seed: int) -> None:
        """There is something to audit, and no sample's seed is too large."""
        if sampling.logprobs is None:
            raise InvalidSampling("logprobs is None, and without logprobs there is nothing to audit; use 0")
        if sampling.seed is not None and sampling.seed > largest_seed - sampling.n + 1:
            raise InvalidSampling(f"seed is {sampling.seed}, and {self.name} takes at most {largest_seed}")

    def _check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens + max_tokens > self.max_model_len:
            raise InvalidPrompt(
                f"{prompt_tokens} prompt tokens and {max_tokens} to generate exceed max_model_len="
                f"{self.max_model_len}; shorten one of the two, or start the server with a larger one"
            )

    def _need(self, capability: Capability) -> None:
        need(self, capability, self.hints[capability])

    def _reads(self, nonsense: Mapping[str, object], falls_over: tuple[int, ...] = ()) -> bool:
        """Servers ignore fields that they do not know: one that refuses nonsense in a field is one that reads it."""
        reply = self._http.exchange("POST", self.path, nonsense)
        if reply.status not in (*REFUSED, *falls_over):
            self._http.read(self.path, reply)
        return reply.status in REFUSED

    def _streams(self, body: dict[str, Any]) -> bool:
        """Whether ids come in a stream; whether they do so rightly is for a probe to say."""
        how = self.streaming
        return not_declined(
            lambda: has_tokens(self._http.stream(self.path, {**body, **how.ask}), how, self.path)
        )

    def _has_route(self, path: str, method: str = "PUT") -> bool:
        """One that takes other methods than `method` answers 405 and does nothing; one that is not there answers 404.

        What a gateway says of routes that it does not let through may be anything, and is no failure of the server.
        """
        return self._http.exchange(method, path).status == 405


def changed(sampling: SamplingParams) -> set[str]:
    """Parameters that differ from their default."""
    defaults = SamplingParams()
    return {name for name in sampling.__struct_fields__ if getattr(sampling, name) != getattr(defaults, name)}


def stated(sampling: SamplingParams, *, explicit: bool = False) -> dict[str, Any]:
    """What is sent of the parameters.

    `explicit` sends every one. Without it those that keep their default stay out, as in most trainers, and the server
    fills them in from wherever it likes: that is a fault to be found.
    """
    sent = sampling.__struct_fields__ if explicit else {*ALWAYS_SENT, *changed(sampling)}
    found = {name: getattr(sampling, name) for name in sampling.__struct_fields__ if name in sent}
    return {name: value for name, value in found.items() if value is not None}

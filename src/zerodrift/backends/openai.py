"""A server that speaks some dialect of the OpenAI calls, seen through the Backend protocol.

The dialect says how things are called; what this server can do is found by asking it when we connect, never by a
version string. What the audit needs beyond that is refused with the flag that would give it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from zerodrift.backends.base import Capability, need
from zerodrift.backends.http import HttpClient
from zerodrift.backends.json_path import look_up
from zerodrift.backends.openai_dialects import Dialect
from zerodrift.backends.openai_wire import Reader, asked_kind, request_body, samples_of, value_at
from zerodrift.core.completion import Answer, EngineFingerprint, LogprobKind
from zerodrift.core.errors import CapabilityMissing, EngineRefused, InvalidPrompt, InvalidSampling
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion

MODELS = "/v1/models"
PROBE = Request(Prompt((0, 0)), SamplingParams(max_tokens=8, seed=0, logprobs=2))
"""More than one token: a server may have no logprob for one of them."""


class OpenAIBackend:
    """One model of one server. A request is one HTTP call; the server makes the batches."""

    def __init__(
        self,
        url: str,
        dialect: Dialect,
        *,
        kind: LogprobKind = LogprobKind.PROCESSED,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Connect, and find out what the server can do. `model` None takes the one that the server serves."""
        self.dialect = dialect
        self.name = dialect.name
        self.kind = kind
        # OpenAI clients are given the address with /v1, so people paste it so.
        address = url.rstrip("/").removesuffix("/v1")
        self._http = HttpClient(address, api_key=api_key, timeout_s=timeout_s)
        try:
            self.model = self._choose(model)
            self._shown = self._http.get(dialect.facts.route)
            self.max_model_len = self._fact(dialect.facts.max_model_len)
            self._most_samples = self._fact(dialect.facts.most_samples)
            self._fingerprint = self._identify()
            self.capabilities = self._probe()
        except BaseException:
            self.close()
            raise

    def fingerprint(self) -> EngineFingerprint:
        """As read when we connected."""
        return self._fingerprint

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """All requests in flight together, as many at a time as the client allows. `sampling` is reported as it was asked for."""
        for request in requests:
            self._check(request)
        reader = Reader(self.dialect, self.kind, self._fingerprint.digest)
        answers = self._http.each(self._complete, requests)
        return [reader.answer(*pair) for pair in zip(answers, requests, strict=True)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """No dialect has it yet."""
        raise self._missing(Capability.SCORE)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As the server does for a plain prompt, special tokens included."""
        self._need(Capability.TOKENIZE)
        return self._tokens(text)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """As the server does for chat: the template makes text of them, and the text becomes ids."""
        self._need(Capability.TOKENIZE)
        route = self.dialect.tokenizer.chat_route
        answer = self._http.post(route, {"messages": list(messages)})
        return self._tokens(value_at(answer, self.dialect.tokenizer.chat_text, str, route))

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """No dialect has it yet."""
        raise self._missing(Capability.LOAD_WEIGHTS)

    def reset_cache(self) -> None:
        """No dialect has it yet."""
        raise self._missing(Capability.RESET_CACHE)

    def close(self) -> None:
        """The server is not ours and runs on. Safe to call twice."""
        self._http.close()

    def _complete(self, request: Request) -> object:
        return self._http.post(self.dialect.completions, self._body(request))

    def _body(self, request: Request) -> dict[str, object]:
        return request_body(request, self.model, self.dialect, self.kind)

    def _tokens(self, text: str) -> tuple[int, ...]:
        facts = self.dialect.tokenizer
        answer = self._http.post(facts.route, {facts.text: text, **facts.ask})
        return tuple(value_at(answer, facts.token_ids, list[int], facts.route))

    def _check(self, request: Request) -> None:
        """What the server would ignore or cut down in silence is refused before it is sent."""
        sampling, defaults = request.sampling, SamplingParams()
        for name, why in self.dialect.cannot.items():
            if getattr(sampling, name) != getattr(defaults, name):
                raise CapabilityMissing(f"{self.name} cannot {name} as it is meant here: {why}")
        if sampling.logprobs is None:
            raise InvalidSampling("logprobs is None, and without logprobs there is nothing to audit; use 0")
        if sampling.n > self._most_samples:
            raise CapabilityMissing(
                f"{self.name} draws {self._most_samples} samples at once here, and {sampling.n} were asked for; "
                f"{self.dialect.facts.more_samples}"
            )
        if sampling.seed is not None and not sampling.seed <= self.dialect.largest_seed - sampling.n + 1:
            raise InvalidSampling(
                f"seed is {sampling.seed}, and {self.name} takes at most {self.dialect.largest_seed}"
            )
        length = len(request.prompt.token_ids)
        if length + sampling.max_tokens > self.max_model_len:
            raise InvalidPrompt(
                f"{length} prompt tokens and {sampling.max_tokens} to generate exceed the {self.max_model_len} "
                "that the server has for a sequence; shorten one of the two, or give the server more"
            )
        for capability, asked_for in (
            (Capability.SEED, sampling.seed is not None),
            (Capability.CACHE_SALT, request.prompt.cache_salt is not None),
            (Capability.TOP_LOGPROBS, bool(sampling.logprobs)),
        ):
            if asked_for:
                self._need(capability)

    def _need(self, capability: Capability) -> None:
        need(self, capability, self.dialect.hints[capability])

    def _missing(self, capability: Capability) -> CapabilityMissing:
        return CapabilityMissing(f"{self.name} cannot {capability}: {self.dialect.hints[capability]}")

    def _choose(self, wanted: str | None) -> str:
        names = value_at(self._http.get(MODELS), "data/*/id", list[str], MODELS)
        if wanted is not None and wanted not in names:
            raise EngineRefused(f"{self._http.address} serves {names}, not {wanted!r}; name one of those")
        if wanted is None and len(names) != 1:
            raise EngineRefused(
                f"{self._http.address} serves {names}; say which one is audited: --set engine.served_model=NAME"
            )
        return wanted or names[0]

    def _fact(self, path: str) -> int:
        return value_at(self._shown, path, int, self.dialect.facts.route)

    def _identify(self) -> EngineFingerprint:
        facts = self.dialect.facts
        return EngineFingerprint(
            engine=self.name,
            semantic={"model": self.model, "logprobs_mode": f"{self.kind}_logprobs"}
            | self._show(facts.semantic),
            numeric=dict(facts.known) | self._show(facts.numeric),
            deployment={"max_model_len": str(self.max_model_len)} | self._show(facts.deployment),
        )

    def _show(self, paths: Mapping[str, str]) -> dict[str, str]:
        """Facts that the server shows; one that it does not is left out: two releases then differ in it."""
        found = {name: look_up(self._shown, path) for name, path in paths.items()}
        return {
            name: value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()
            for name, value in found.items()
            if value is not msgspec.UNSET
        }

    def _probe(self) -> frozenset[Capability]:
        dialect, route = self.dialect, self.dialect.completions
        sample = look_up(samples_of(self._complete(PROBE), dialect), "0")
        if not value_at(sample, dialect.token_ids, list[int], route):
            raise CapabilityMissing(
                f"{route} returns no {dialect.token_ids!r}, and text cannot be turned back into ids"
            )
        numbers = dialect.numbers[asked_kind(PROBE.sampling, self.kind)]
        if look_up(sample, numbers.values) is msgspec.UNSET:
            other = LogprobKind.RAW if self.kind is LogprobKind.PROCESSED else LogprobKind.PROCESSED
            raise CapabilityMissing(
                f"{route} returns no {numbers.values!r}, so the server has no {self.kind} logprobs; use a newer "
                f"release, or audit the other kind: --set engine.logprobs_mode={other}_logprobs"
            )
        alternatives = look_up(sample, numbers.alternative_ids)
        found = {
            Capability.TOP_LOGPROBS: alternatives is not msgspec.UNSET and any(map(bool, alternatives)),
            Capability.SEED: self._reads("seed"),
            Capability.CACHED_TOKENS: isinstance(look_up(sample, dialect.cached_tokens), int),
            Capability.TOKENIZE: self._tokenizes(),
            Capability.EFFECTIVE_CONFIG: all(
                look_up(self._shown, path) is not msgspec.UNSET for path in dialect.facts.semantic.values()
            ),
        }
        return frozenset(capability for capability, present in found.items() if present)

    def _reads(self, field: str) -> bool:
        """Servers ignore fields that they do not know: one that refuses nonsense is one that it reads."""
        body = self._body(PROBE) | {self.dialect.names.get(field, field): "?"}
        return self._http.exchange("POST", self.dialect.completions, body).status in (400, 422)

    def _tokenizes(self) -> bool:
        facts = self.dialect.tokenizer
        asked = {
            facts.route: {facts.text: "a", **facts.ask},
            facts.chat_route: {"messages": [{"role": "user", "content": "a"}]},
        }
        return all(self._http.exchange("POST", route, body).status == 200 for route, body in asked.items())

"""llama.cpp's own server, and those that are built on it."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from zerodrift.backends.base import Capability
from zerodrift.backends.http import CLOSED, REFUSALS
from zerodrift.backends.json_path import facts_at
from zerodrift.backends.samples import Pairs, ToldSample, number, parse, value_at
from zerodrift.backends.server import UNKNOWN, ServerBackend, stated
from zerodrift.backends.stream_deltas import Streaming
from zerodrift.core.completion import EngineFingerprint, FinishReason, LogprobKind
from zerodrift.core.errors import CapabilityMissing, NonFinite
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion

CONTEXT = "default_generation_settings/n_ctx"
PROPS, TOKENIZE, TEMPLATE = "/props", "/tokenize", "/apply-template"
LARGEST_SEED = 2**32 - 2
"""One more stands for "draw a seed", and beyond it the number is cut to 32 bits in silence."""
LOST = "llama.cpp reports none for a token that ends inside a character, such as the first half of an emoji"
PROBE = Request(Prompt((0, 0)), SamplingParams(max_tokens=8, logprobs=2))
"""More than one token: there may be no logprob for one of them."""
REASONS = {"limit": FinishReason.LENGTH, "eos": FinishReason.STOP, "word": FinishReason.STOP}

HINTS = {
    Capability.TOP_LOGPROBS: "the server must read n_probs; a newer release does",
    Capability.SEED: "the server must read seed; a newer release does",
    Capability.TOKENIZE: "the server must have /tokenize and /apply-template; a newer release does",
    Capability.CACHED_TOKENS: "the server must report timings/cache_n; a newer release does",
    Capability.EFFECTIVE_CONFIG: "the server must show /props; a newer release does",
    Capability.STREAM: "the server must stream tokens (return_tokens); a newer release does",
}
_NO_WEIGHTS = "llama.cpp serves the file that it was started with; start it again for other weights"
NEVER = {
    Capability.SCORE: "llama.cpp's server scores no prompts",
    Capability.CACHE_SALT: "llama.cpp knows no salts; start the server with --no-cache-prompt",
    Capability.RESET_CACHE: "llama.cpp forgets slots, but not what it keeps beside them; use --no-cache-prompt",
    Capability.LOAD_WEIGHTS: _NO_WEIGHTS,
    Capability.WEIGHT_VERSION: _NO_WEIGHTS,
}

SEMANTIC = {
    name: f"default_generation_settings/params/{name}"
    for name in ("samplers", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "mirostat", "lora")
}
NUMERIC = {
    "quantization": "model_ftype",
    "speculative": "default_generation_settings/params/speculative.types",
    "build": "build_info",
}


CANNOT = {
    "repetition_penalty": "it looks back over the last 64 tokens, not over all",
    "presence_penalty": "it counts tokens of the prompt as well",
    "frequency_penalty": "it counts tokens of the prompt as well",
    "min_tokens": "the server has no such field",
    "stop_token_ids": "the server has no such field",
    "stop": "the server drops the logprobs of the tokens that spell a stop string, and keeps the tokens",
    "ignore_eos": "the server bans end tokens, which changes the distribution, instead of going on after them",
    "prompt_logprobs": "the server has no such field",
}


class _Raw(msgspec.Struct):
    id: int
    logprob: float | None


class _RawEntry(_Raw):
    top_logprobs: list[_Raw]


class _Processed(msgspec.Struct):
    id: int
    logprob: float | None = msgspec.field(name="prob")


class _ProcessedEntry(_Processed):
    top_logprobs: list[_Processed] = msgspec.field(name="top_probs")


class _Timings(msgspec.Struct):
    cache_n: int | None = None


class _Generated(msgspec.Struct):
    tokens: list[int]
    tokens_evaluated: int
    stop_type: Literal["limit", "eos", "word"]
    completion_probabilities: list[dict[str, Any]] | None = None
    tokens_predicted: int | None = None
    content: str | None = None
    timings: _Timings | None = None


class LlamaCppBackend(ServerBackend):
    """One model of one llama.cpp server."""

    name = "llama-cpp"
    # Not /v1/completions: only the native call returns the sampled ids.
    path = "/completion"
    hints = HINTS | NEVER
    cannot = CANNOT
    streaming = Streaming(
        ask={"stream": True},
        index="index",
        lists=("tokens", "completion_probabilities"),
        text="content",
        finish="stop_type",
        # Only the OpenAI routes end so.
        done=False,
    )

    def __init__(self, url: str, *, kind: LogprobKind = LogprobKind.PROCESSED, **connection: Any) -> None:
        """`kind` is asked for call by call, so that a server which runs already obeys as well."""
        self.kind = kind
        super().__init__(url, **connection)

    def fingerprint(self) -> EngineFingerprint:
        """As the server shows it now: one that was started anew may show other settings."""
        return self._facts(self._shown(PROPS))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As the server does for a plain prompt, special tokens included."""
        self._need(Capability.TOKENIZE)
        asked = {"content": text, "add_special": True, "parse_special": True}
        return tuple(value_at(self._http.post(TOKENIZE, asked), "tokens", list[int], TOKENIZE))

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """As the server does for chat: the template makes text of them, and the text becomes ids."""
        self._need(Capability.TOKENIZE)
        if not generation_prompt:
            # A field that a release does not know is ignored in silence.
            raise CapabilityMissing(
                f"{self.name} cannot render chat without a generation prompt by {TEMPLATE}"
            )
        answer = self._http.post(TEMPLATE, {"messages": list(messages)})
        return self.tokenize(value_at(answer, "prompt", str, TEMPLATE))

    def body(self, request: Request) -> dict[str, Any]:
        """At least one alternative: without, the sampled token's own logprob does not come back."""
        sampling = stated(request.sampling)
        told = {
            "n_predict": sampling.pop("max_tokens"),
            "n_probs": max(sampling.pop("logprobs", 0), 1),
            "return_tokens": True,
        }
        if self._processed(request):
            told["post_sampling_probs"] = True
        return {"model": self.model, "prompt": request.prompt.token_ids, **sampling, **told}

    def _processed(self, request: Request) -> bool:
        """Not where the sampler is greedy: the distribution after it is a point, and the model's own is what is meant."""
        return self.kind is LogprobKind.PROCESSED and not request.sampling.greedy

    def _connect(self, model: str | None) -> None:
        cards = self._choose(model)
        self.model = model or self._only(cards)
        shown = self._shown(PROPS)
        self.max_model_len = value_at(shown, CONTEXT, int, PROPS)
        self._slots = value_at(shown, "total_slots", int, PROPS)
        facts = self._facts(shown)
        self._digest = facts.digest
        self._effective = SEMANTIC.keys() <= facts.semantic.keys()

    def _facts(self, shown: dict[str, Any]) -> EngineFingerprint:
        return EngineFingerprint(
            engine=self.name,
            semantic={"model": self.model, "logprobs_mode": f"{self.kind}_logprobs"}
            | facts_at(shown, SEMANTIC),
            # Between its operations llama.cpp keeps fp32, whatever the weights; KV is fp16 unless told otherwise.
            numeric={"dtype": "float32"} | facts_at(shown, NUMERIC),
            deployment={"max_model_len": str(value_at(shown, CONTEXT, int, PROPS))}
            | facts_at(shown, {"max_num_seqs": "total_slots"}),
        )

    def _probe(self) -> dict[Capability, bool]:
        body = self.body(PROBE)
        sample = parse(self._http.post(self.path, body), _Generated, self.path)
        if not sample.tokens:
            raise CapabilityMissing(
                f"{self.path} returns no tokens, and text cannot be turned back into ids; use a newer release"
            )
        entries, processed = sample.completion_probabilities or [], self._processed(PROBE)
        word, other = ("prob", LogprobKind.RAW) if processed else ("logprob", LogprobKind.PROCESSED)
        if not entries or any(word not in entry for entry in entries):
            raise CapabilityMissing(
                f"{self.path} returns no {word!r}, so the server has no {self.kind} logprobs; use a newer release, or audit "
                f"the other kind: --set engine.logprobs_mode={other}_logprobs"
            )
        # It answers 500 where the model's template raises.
        cannot = REFUSALS | CLOSED | {500}
        chat = {"messages": [{"role": "user", "content": "a"}]}
        return {
            Capability.TOP_LOGPROBS: any(entry.get(f"top_{word}s") for entry in entries),
            Capability.SEED: self._reads(body | {"seed": "?"}, falls_over=(500,)),
            Capability.CACHED_TOKENS: sample.timings is not None and sample.timings.cache_n is not None,
            Capability.TOKENIZE: self._http.can(TOKENIZE, {"content": "a"}, cannot)
            and self._http.can(TEMPLATE, chat, cannot),
            Capability.EFFECTIVE_CONFIG: self._effective,
            Capability.STREAM: self._streams(body),
        }

    def _check(self, request: Request) -> None:
        self._check_numbers(request.sampling, LARGEST_SEED)
        if request.sampling.n > self._slots:
            raise CapabilityMissing(
                f"{self.name} draws {self._slots} samples at once here, and {request.sampling.n} were asked for; "
                "start the server with --parallel of at least that"
            )
        super()._check(request)

    def _numbered(self, answers: Sequence[object], request: Request) -> list[tuple[int, Any]]:
        [answer] = answers
        samples = answer if isinstance(answer, list) else [answer]
        return [(value_at(sample, "index", int, self.path), sample) for sample in samples]

    def _sample(self, raw: Any, request: Request, version: WeightVersion) -> ToldSample:
        told = parse(raw, _Generated, self.path)
        shape: Any = _ProcessedEntry if self._processed(request) else _RawEntry
        entries = [parse(entry, shape, self.path) for entry in told.completion_probabilities or ()]
        return ToldSample(
            prompt_token_ids=request.prompt.token_ids,
            token_ids=told.tokens,
            owners=[entry.id for entry in entries],
            logprobs=[_logprob(entry) for entry in entries],
            top_logprobs=[_pairs(entry, request.sampling.logprobs or 0) for entry in entries],
            kind=LogprobKind.PROCESSED if self._processed(request) else LogprobKind.RAW,
            finish_reason=REASONS[told.stop_type],
            versions=(VersionSpan(UNKNOWN, 0, len(told.tokens)),) if told.tokens else (),
            cached_tokens=None if told.timings is None else told.timings.cache_n,
            text=told.content,
            prompt_tokens=told.tokens_evaluated,
            made=told.tokens_predicted,
            lost=LOST,
        )


def _pairs(entry: _RawEntry | _ProcessedEntry, count: int) -> Pairs:
    return [(each.id, _logprob(each)) for each in entry.top_logprobs] if count else []


def _logprob(entry: _Raw | _Processed) -> float:
    """Of a probability the logarithm."""
    value = number(entry.logprob)
    if isinstance(entry, _Raw):
        return value
    if not 0 < value <= 1:
        raise NonFinite(f"a probability is {value}, and a token that was drawn has one in (0, 1]")
    return math.log(value)

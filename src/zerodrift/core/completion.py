"""What an engine gave back: tokens, each with its behaviour logprob and the weights that made it.

A completion that lacks a logprob, carries a NaN, or leaves a token without a weight version cannot be built:
the faults that fill RL post-mortems are refused where they enter.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import ContractViolation, InvalidCompletion, InvalidValue, NonFinite
from zerodrift.core.frozen import freeze
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion, check_cover


class LogprobKind(StrEnum):
    """Which distribution a logprob belongs to."""

    PROCESSED = "processed"
    """The one sampled from: after bias, penalties, temperature and truncation."""
    RAW = "raw"
    """The model's own, before any of that."""


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenAlternative(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of a top-k report."""

    token_id: int
    logprob: float


NAN_AS_NUMBER = -9999.0
"""What vLLM writes for NaN, and for -inf."""


class Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sampled sequence, with all that a trainer needs to reproduce its logprobs."""

    prompt_token_ids: tuple[int, ...]
    """As the engine saw them, which is not always as they were sent."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour logprob of each token, of the kind below."""
    kind: LogprobKind
    sampling: SamplingParams
    """As resolved by the engine, with the seed that was used."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    """Weights that made each token's logits; spans over the output."""
    fingerprint: str
    """Digest of the engine's `EngineFingerprint`."""
    sample_index: int = 0
    lineage: tuple[LineageSegment, ...] = ()
    """Weights that wrote the KV, over prompt and output; empty where the engine cannot tell."""
    top_logprobs: tuple[tuple[TokenAlternative, ...], ...] = ()
    """Alternatives per token, as many as were asked for; empty when none were."""
    prompt_logprobs: tuple[float | None, ...] = ()
    """Raw logprob of each prompt token; the first has none."""
    cached_tokens: int | None = None
    """Prompt tokens that came from a prefix cache; None where the engine does not say."""
    text: str | None = None

    def __post_init__(self) -> None:
        """Impossible completions are refused."""
        require.token_ids(InvalidCompletion, "token_ids", self.token_ids)
        require.token_ids(InvalidCompletion, "prompt_token_ids", self.prompt_token_ids)
        if not self.prompt_token_ids and (self.token_ids or self.finish_reason is not FinishReason.ERROR):
            raise InvalidCompletion("the engine reports an empty prompt; ask it to return prompt token ids")
        _check_kinds(self)
        if len(self.logprobs) != len(self.token_ids):
            raise InvalidCompletion(
                f"{len(self.token_ids)} tokens carry {len(self.logprobs)} logprobs; "
                "every sampled token needs one: request logprobs from the engine"
            )
        check_logprobs("logprobs", self.logprobs)
        _check_alternatives(self)
        _check_prompt(self)
        _check_versions(self)
        require.whole(InvalidCompletion, "sample_index", self.sample_index, "it counts samples from 0", 0)

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and output, as the trainer scores them."""
        return self.prompt_token_ids + self.token_ids

    @property
    def made_by(self) -> tuple[WeightVersion, ...]:
        """All weights that its tokens come from: those that made them, and those that wrote the KV which they looked back on."""
        return tuple(dict.fromkeys(part.version for part in (*self.versions, *self.lineage)))

    def completion(self) -> "Completion":
        """Only what every engine gives, as records hold it."""
        return Completion(**{name: getattr(self, name) for name in Completion.__struct_fields__})


def _check_kinds(completion: Completion) -> None:
    for name, kind in (
        ("kind", LogprobKind),
        ("sampling", SamplingParams),
        ("finish_reason", FinishReason),
        ("fingerprint", str),
        ("text", str | None),
    ):
        require.instance(InvalidCompletion, name, getattr(completion, name), kind)
    require.each(InvalidCompletion, "versions", completion.versions, VersionSpan)
    require.each(InvalidCompletion, "lineage", completion.lineage, LineageSegment)
    for name in ("logprobs", "prompt_logprobs", "top_logprobs"):
        require.a_tuple(InvalidCompletion, name, getattr(completion, name))


def _check_alternatives(completion: Completion) -> None:
    entries = completion.top_logprobs
    if entries and len(entries) != len(completion.token_ids):
        raise InvalidCompletion(
            f"{len(completion.token_ids)} tokens carry alternatives for {len(entries)}; each needs its own"
        )
    for position, alternatives in enumerate(entries):
        name = f"top_logprobs[{position}]"
        require.each(InvalidCompletion, name, alternatives, TokenAlternative)
        require.token_ids(InvalidCompletion, name, tuple(each.token_id for each in alternatives))
        # As unlikely as a small temperature makes it: only the very number that stands for NaN is suspect.
        values = (each.logprob for each in alternatives)
        check_logprobs(name, (value for value in values if not -math.inf < value < NAN_AS_NUMBER))


def _check_prompt(completion: Completion) -> None:
    values, length = completion.prompt_logprobs, len(completion.prompt_token_ids)
    if values:
        if len(values) != length:
            raise InvalidCompletion(
                f"{length} prompt tokens carry {len(values)} prompt logprobs; each needs one"
            )
        if values[0] is not None:
            raise InvalidCompletion(f"prompt_logprobs[0] is {values[0]}; nothing predicts the first token")
        # A certain first token stands in for the missing one, so that positions in messages are right.
        check_logprobs("prompt_logprobs", (0.0, *values[1:]))
    if completion.cached_tokens is not None:
        # No upper bound: an engine may count the cached tokens of all samples of a request together.
        require.whole(InvalidCompletion, "cached_tokens", completion.cached_tokens, "it counts tokens", 0)


def _check_versions(completion: Completion) -> None:
    outputs = len(completion.token_ids)
    check_cover(completion.versions, outputs, "weight-version spans")
    if completion.lineage:
        # The KV of the last sampled token is never written: nothing looked back on it yet.
        written = len(completion.prompt_token_ids) + max(outputs - 1, 0)
        check_cover(completion.lineage, written, "lineage segments")


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sample that came back and could not be a `Completion`; `code` is that of the error it would raise."""

    code: str
    message: str

    def __post_init__(self) -> None:
        """Both are text."""
        require.instance(InvalidValue, "code", self.code, str)
        require.instance(InvalidValue, "message", self.message, str)


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All samples of one request: what could be read, and what could not. Nothing is dropped in silence."""

    completions: tuple[Completion, ...]
    problems: tuple[Problem, ...] = ()
    stream_deltas: int = 0
    """How many deltas of a stream with tokens in them it was put together from; 0: it came whole."""

    def __post_init__(self) -> None:
        """Nothing else is an answer."""
        require.each(InvalidValue, "completions", self.completions, Completion)
        require.each(InvalidValue, "problems", self.problems, Problem)
        require.whole(InvalidValue, "stream_deltas", self.stream_deltas, "it counts deltas of a stream", 0)


def check_logprobs(name: str, values: Iterable[float | None]) -> None:
    """Finite, and at most zero. vLLM writes -9999 for both -inf and NaN: that is a hidden NaN, and refused."""
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidCompletion(
                f"{name}[{position}] is {value!r}, which is no number; request logprobs from the engine"
            )
        if not math.isfinite(value):
            raise NonFinite(
                f"{name}[{position}] is {value}; the row it came from is corrupt: discard the completion "
                "and look for NaN in weights or activations"
            )
        if value <= NAN_AS_NUMBER + 1:
            raise NonFinite(
                f"{name}[{position}] is {value}, the number some engines write for NaN or -inf; discard the "
                "completion, and look for NaN in weights or activations"
            )
        # A softmax in fp32 may round to a hair above zero; more than that is no logprob.
        if value > 1e-4:
            raise InvalidCompletion(
                f"{name}[{position}] is {value}, which is no log-probability (above 0); report the log of a "
                "softmax, not a probability, a logit or a loss"
            )


class LogprobContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the trainer must be able to reproduce: which distribution, and with which parameters.

    A trainer that takes a softmax of logits / temperature can replay temperature and nothing else; truncation,
    penalties and bias need the kept set or the whole processing.
    """

    kind: LogprobKind
    sampling: SamplingParams
    replays_processing: bool = False
    """The trainer applies the full processing (bias, penalties, truncation) to its own logits."""

    def __post_init__(self) -> None:
        """What the trainer cannot replay is refused here, before it biases a gradient."""
        require.instance(ContractViolation, "kind", self.kind, LogprobKind)
        require.instance(ContractViolation, "sampling", self.sampling, SamplingParams)
        require.instance(ContractViolation, "replays_processing", self.replays_processing, bool)
        if self.replays_processing:
            return
        shown = self._beyond_a_softmax()
        if shown and self.kind is LogprobKind.RAW:
            raise ContractViolation(
                f"raw logprobs are the model's own, and the tokens were drawn under {shown}: report processed "
                "logprobs, sample without these, or replay the processing in the trainer"
            )
        if shown:
            raise ContractViolation(
                f"{shown} change the sampled distribution in a way that a softmax of the logits cannot reproduce: "
                "sample without them, or replay the processing in the trainer"
            )

    def _beyond_a_softmax(self) -> str:
        """Parameters that move the distribution from the one that `kind` is of; the trainer divides by temperature."""
        if self.kind is LogprobKind.RAW and self.sampling.own_distribution:
            return ""
        plain, known = SamplingParams().shape, self.kind is LogprobKind.PROCESSED
        return ", ".join(
            f"{name}={value}"
            for name, value in self.sampling.shape.items()
            if value != plain.get(name) and not (known and name == "temperature")
        )


class EngineFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who computed the numbers, in three parts that are compared separately.

    Two runs that differ only in `deployment` must agree in every number; a difference in `numeric` explains
    rounding; a difference in `semantic` means that the numbers do not mean the same thing.
    """

    engine: str
    semantic: Mapping[str, str]
    """What the numbers mean: logprob mode, sampling defaults, model, tokenizer, template."""
    numeric: Mapping[str, str]
    """How they are computed: dtypes, kernels, attention backend, parallelism, library versions."""
    deployment: Mapping[str, str]
    """Where: host, cache sizes, limits."""

    def __post_init__(self) -> None:
        """Facts are strings, so that digests do not depend on float formatting."""
        require.instance(InvalidValue, "engine", self.engine, str)
        freeze(self, "semantic", "numeric", "deployment")
        for part in (self.semantic, self.numeric, self.deployment):
            for key, value in part.items():
                if type(key) is not str or type(value) is not str:
                    raise InvalidValue(f"fingerprint fact {key!r} is {value!r}; write facts as strings")

    @property
    def digest(self) -> str:
        """Short digest of all three parts."""
        return _digest([self.engine, self.semantic, self.numeric, self.deployment])

    def digests(self) -> dict[str, str]:
        """One digest per part."""
        return {
            "semantic": _digest([self.engine, self.semantic]),
            "numeric": _digest([self.engine, self.numeric]),
            "deployment": _digest([self.engine, self.deployment]),
        }


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]

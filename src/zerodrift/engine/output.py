"""What the engine gives back: a completion, and what only an engine of our own can say about it."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from zerodrift.core.completion import Completion, FinishReason, Problem, TokenAlternative
from zerodrift.core.errors import EngineError, InvalidValue, ZerodriftError
from zerodrift.core.frozen import freeze
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.core.version import AdapterVersion, LineagePass, WeightVersion
from zerodrift.engine.identity import Identity
from zerodrift.engine.plan import Drawn
from zerodrift.engine.sample import Sample

_FIRST, _SHOWN = 6, 60
"""Numbers of a list, and characters of a text, that `repr` shows."""


class OnError(StrEnum):
    """What `generate` does with a request that cannot be served."""

    RAISE = "raise"
    RETURN = "return"


class Output(Completion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sample of one request. A request that failed has finish reason `error`, and a problem that says why."""

    request_id: str
    numeric: Mapping[str, str]
    """Numeric fingerprint: a trainer with the same one computes the same bits, one with another is not to try."""
    problem: Problem | None = None
    logits: tuple[float, ...] = ()
    """Of each token, in the two logits modes: raw ones or processed ones."""
    top_logits: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Of the likeliest tokens, in the two logits modes."""
    prompt_top_logprobs: tuple[tuple[TokenAlternative, ...], ...] = ()
    """Alternatives for prompt tokens, as many as were asked for; the first prompt token has none."""
    past: tuple[LineagePass, ...] = ()
    """KV that earlier tokens looked back on and that was written anew since; the last ones' is `lineage`."""
    lora: AdapterVersion | None = None
    """The adapter that stood beside the weights of `versions`, for every token."""

    def __post_init__(self) -> None:
        """As a completion, and what it says of numerics cannot be changed either."""
        super().__post_init__()
        freeze(self, "numeric")

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What one looks for first; `msgspec.structs.asdict` has the rest."""
        text = self.text
        shown = [
            ("request_id", self.request_id),
            ("sample_index", self.sample_index),
            ("prompt_token_ids", _Few(self.prompt_token_ids)),
            ("token_ids", _Few(self.token_ids)),
            ("logprobs", _Few(self.logprobs)),
            ("text", text if text is None or len(text) <= _SHOWN else f"{text[:_SHOWN]}…"),
            ("finish_reason", str(self.finish_reason)),
            ("version", self.versions[-1].version.label if self.versions else None),
        ]
        return shown if self.problem is None else [*shown, ("problem", self.problem.code)]

    def __repr__(self) -> str:
        """On a screen: a thousand logprobs would push everything else off it."""
        return f"Output({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    @property
    def made_by(self) -> tuple[WeightVersion, ...]:
        """Also weights whose KV was written anew since, over which tokens were drawn, and the adapter."""
        past = (segment.version for each in self.past for segment in each.segments)
        adapter = () if self.lora is None else (WeightVersion(self.lora.name, self.lora.digest),)
        return tuple(dict.fromkeys((*super().made_by, *past, *adapter)))


class _Few(tuple[Any, ...]):
    """The first ones and how many there are."""

    def __repr__(self) -> str:
        if len(self) <= _FIRST:
            return repr(tuple(self))
        return f"({', '.join(f'{each:.4g}' for each in self[:_FIRST])}, … {len(self)} in all)"


def require_served(outputs: Sequence[Output]) -> None:
    """Raise what went wrong with the first that failed."""
    for output in outputs:
        if output.problem is not None:
            raise EngineError(
                f'{output.request_id} failed ({output.problem.code}): {output.problem.message}; with on_error="return" '
                "the others are given back beside it"
            )


def output_of(sample: Sample, identity: Identity, text: str | None) -> Output:
    """A finished sample as a value."""
    try:
        return _whole(sample, identity, text)
    except (EngineError, InvalidValue) as error:
        # Numbers that no completion may carry, as a forced token that is all but impossible: its request's alone.
        failed = refused(sample.request_id, Prompt(sample.prompt), sample.sampling, identity, error)
        return msgspec.structs.replace(failed, sample_index=sample.sample_index)


def _whole(sample: Sample, identity: Identity, text: str | None) -> Output:
    assert sample.finish_reason is not None, "a sample was read before it ended"
    drawn = sample.drawn
    return Output(
        prompt_token_ids=sample.prompt,
        token_ids=tuple(sample.output),
        logprobs=tuple(sample.logprobs),
        kind=identity.kind,
        sampling=sample.sampling,
        finish_reason=sample.finish_reason,
        versions=sample.versions,
        fingerprint=identity.fingerprint,
        sample_index=sample.sample_index,
        lineage=sample.lineage,
        top_logprobs=tuple(_alternatives(each.alternatives) for each in drawn)
        if sample.sampling.logprobs
        else (),
        prompt_logprobs=_prompt_logprobs(sample),
        cached_tokens=sample.cached_tokens or 0,
        text=text,
        request_id=sample.request_id,
        numeric=identity.numeric,
        problem=sample.problem,
        logits=tuple(each.logit for each in drawn if each.logit is not None),
        top_logits=_top_logits(drawn),
        prompt_top_logprobs=_prompt_tops(sample),
        past=tuple(sample.past),
        lora=sample.lora,
    )


def refused(
    request_id: str,
    prompt: Prompt | None,
    sampling: SamplingParams,
    identity: Identity,
    error: ZerodriftError,
) -> Output:
    """A request that was never queued, as one output whatever `n` is; without a prompt where it was none."""
    return Output(
        prompt_token_ids=() if prompt is None else prompt.token_ids,
        token_ids=(),
        logprobs=(),
        kind=identity.kind,
        sampling=sampling,
        finish_reason=FinishReason.ERROR,
        versions=(),
        fingerprint=identity.fingerprint,
        request_id=request_id,
        numeric=identity.numeric,
        problem=Problem(error.code, str(error)),
    )


def _alternatives(pairs: tuple[tuple[int, float], ...]) -> tuple[TokenAlternative, ...]:
    return tuple(TokenAlternative(token, value) for token, value in pairs)


def _top_logits(drawn: list[Drawn]) -> tuple[tuple[tuple[int, float], ...], ...]:
    return tuple(each.top_logits for each in drawn) if any(each.top_logits for each in drawn) else ()


def _scored(sample: Sample) -> bool:
    """Whether every prompt token has its logprob; a request that ended early has none to show."""
    wanted = sample.sampling.prompt_logprobs is not None and bool(sample.output)
    return wanted and len(sample.prompt_scores) == len(sample.prompt) - 1


def _prompt_logprobs(sample: Sample) -> tuple[float | None, ...]:
    return (None, *(score.logprob for score in sample.prompt_scores)) if _scored(sample) else ()


def _prompt_tops(sample: Sample) -> tuple[tuple[TokenAlternative, ...], ...]:
    if not _scored(sample) or not sample.sampling.prompt_logprobs:
        return ()
    return ((), *(_alternatives(score.alternatives) for score in sample.prompt_scores))


class SampleUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What a step gave to one sample. All updates of a sample, joined, are its output."""

    request_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    """What can be shown now, of requests that asked for text as it comes; what a stop string may yet cut is held back."""
    top_logprobs: tuple[tuple[TokenAlternative, ...], ...] = ()
    """Alternatives for each of these tokens, as many as were asked for."""
    output: Output | None = None
    """The whole, with the last update."""


def update_of(sample: Sample, text: str, output: Output | None) -> SampleUpdate:
    """What `sample` has beyond what it reported before; `output` where it is finished."""
    given, sample.reported = sample.reported, len(sample.output)
    return SampleUpdate(
        request_id=sample.request_id,
        sample_index=sample.sample_index,
        token_ids=tuple(sample.output[given:]),
        logprobs=tuple(sample.logprobs[given:]),
        text=text,
        top_logprobs=tuple(_alternatives(each.alternatives) for each in sample.drawn[given:])
        if sample.sampling.logprobs
        else (),
        output=output,
    )

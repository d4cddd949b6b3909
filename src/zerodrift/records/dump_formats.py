"""Formats that rollouts are recorded in, each as one function from a decoded line to recorded rollouts.

    zerodrift   rollouts.jsonl of one of our own runs
    plain       one object per line: prompt_token_ids, token_ids, logprobs, and what else is known
    prime-rl    token_exports/step_N/rank_M.jsonl of prime-rl, schema 1: one object per packed sequence, with aligned
                lists over prompt and output

A reader states what the line says and nothing else; it never looks at another line.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.errors import InvalidCompletion, InvalidSampling, InvalidValue, NonFinite, RecordError
from zerodrift.core.request import SHAPING, SamplingParams
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.rollout import Rollout


class DumpFormat(StrEnum):
    """How a dump is written."""

    ZERODRIFT = "zerodrift"
    PLAIN = "plain"
    PRIME_RL = "prime-rl"


class Place(NamedTuple):
    """Where a line stands, and what its silence about sampling means."""

    source: str
    line: int
    default: SamplingParams
    given: frozenset[str] = frozenset()
    """Names of the defaults that somebody vouches for."""


Fields = Mapping[str, Any]
Reader = Callable[[Fields, Place], list[RecordedRollout]]

PROMPT_KEYS = ("prompt_token_ids", "prompt_ids")
OUTPUT_KEYS = ("token_ids", "completion_ids")
PRIME_RL_SCHEMA = 1
# Fields of vLLM's SamplingParams that say how to answer and not what to draw.
_SHAPELESS = frozenset(
    {
        "best_of",
        "detokenize",
        "include_stop_str_in_output",
        "output_kind",
        "return_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)


def detect(fields: Fields) -> DumpFormat | None:
    """The format that has these keys; None where none has."""
    keys = fields.keys()
    if {"index", "group", "request"} <= keys:
        return DumpFormat.ZERODRIFT
    if {"token_ids", "loss_mask", "inference_logprobs"} <= keys:
        return DumpFormat.PRIME_RL
    if "logprobs" in keys and keys & set(PROMPT_KEYS) and keys & set(OUTPUT_KEYS):
        return DumpFormat.PLAIN
    return None


def read_own(fields: Fields, place: Place) -> list[RecordedRollout]:
    """A line of `rollouts.jsonl`; one without a completion says why, and is refused for that reason."""
    rollout = msgspec.convert(fields, Rollout, str_keys=True)
    completion = rollout.completion
    if completion is None:
        assert rollout.problem is not None, "a rollout is a completion or a problem"
        error = NonFinite if rollout.problem.code == NonFinite.code else InvalidCompletion
        raise error(f"the engine gave no usable answer: {rollout.problem.message}")
    versions = dict.fromkeys(span.version.label for span in completion.versions)
    return [
        RecordedRollout(
            source=place.source,
            line=place.line,
            # As it was sent: this is what a trainer scores. What the engine made of it is for attribution to find.
            prompt=rollout.request.prompt.token_ids,
            output=completion.token_ids,
            logprobs=completion.logprobs,
            kind=completion.kind,
            sampling=rollout.request.sampling,
            stated=frozenset(SHAPING),
            version="+".join(versions) or None,
            finish_reason=completion.finish_reason,
        )
    ]


def read_plain(fields: Fields, place: Place) -> list[RecordedRollout]:
    """The least that can be judged is prompt ids, output ids and logprobs."""
    stated = _stated(fields)
    return [
        RecordedRollout(
            source=place.source,
            line=place.line,
            step=fields.get("step"),
            prompt=_list(fields, *PROMPT_KEYS),
            output=_list(fields, *OUTPUT_KEYS),
            logprobs=_list(fields, "logprobs"),
            kind=_kind(fields),
            sampling=_sampling(place.default, stated),
            stated=frozenset({*place.given, *stated}),
            trainer_logprobs=_list(fields, "trainer_logprobs")
            if _given(fields, "trainer_logprobs")
            else None,
            version=_label(fields),
            model=_text(fields, "model"),
            finish_reason=_finish_reason(fields),
        )
    ]


def read_prime_rl(fields: Fields, place: Place) -> list[RecordedRollout]:
    """One rollout for each run of sampled tokens: turns, with tool output between them, were sampled one by one.

    Schema 1 has no temperature: trainer and engine both divided by it, and the caller must say which it was. Numbers
    that were not finite were written as null.
    """
    if fields.get("schema_version") != PRIME_RL_SCHEMA:
        raise InvalidValue(
            f"schema_version is {fields.get('schema_version')!r}, and this reader knows {PRIME_RL_SCHEMA}; "
            "convert the dump to plain lines"
        )
    ids, engine = _list(fields, "token_ids"), _list(fields, "inference_logprobs")
    trainer = _list(fields, "trainer_logprobs")
    sampled = _sampled(fields, len(ids))
    for name, values in (("inference_logprobs", engine), ("trainer_logprobs", trainer)):
        if len(values) != len(ids):
            raise InvalidCompletion(f"{len(ids)} token_ids carry {len(values)} {name}; each needs one")
    rollouts = []
    for begin, end in _runs(sampled):
        for name, values in (("inference_logprobs", engine), ("trainer_logprobs", trainer)):
            if None in values[begin:end]:
                raise NonFinite(f"{name} hold null, which prime-rl writes for NaN and infinities")
        rollouts.append(
            RecordedRollout(
                source=place.source,
                line=place.line,
                step=fields.get("step"),
                prompt=ids[:begin],
                output=ids[begin:end],
                logprobs=engine[begin:end],
                trainer_logprobs=trainer[begin:end],
                sampling=place.default,
                stated=place.given,
            )
        )
    return rollouts


READERS: Mapping[DumpFormat, Reader] = {
    DumpFormat.ZERODRIFT: read_own,
    DumpFormat.PLAIN: read_plain,
    DumpFormat.PRIME_RL: read_prime_rl,
}


def _sampled(fields: Fields, length: int) -> list[bool]:
    """Tokens in the loss that the policy itself sampled: those of a frozen model carry no behaviour logprob."""
    columns = {
        name: _list(fields, name) if _given(fields, name) else (None,) * length
        for name in ("loss_mask", "rl_weights", "ref_kl_weights")
    }
    for name, values in columns.items():
        if len(values) != length:
            raise InvalidCompletion(f"{length} token_ids carry {len(values)} {name}; each needs one")
    return [
        bool(mask) and not (policy == 0 and not distilled)
        for mask, policy, distilled in zip(*columns.values(), strict=True)
    ]


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of true flags."""
    begin = 0
    for flag, run in groupby(flags):
        end = begin + len(list(run))
        if flag:
            yield begin, end
        begin = end


def _stated(fields: Fields) -> dict[str, Any]:
    """Sampling parameters out of a `sampling` object and beside it; null says nothing."""
    inner = fields.get("sampling") or {}
    if not isinstance(inner, dict):
        raise InvalidSampling(f"sampling is {inner!r}; write an object, as {{'temperature': 0.7}}")
    if unknown := sorted(inner.keys() - set(SamplingParams.__struct_fields__) - _SHAPELESS):
        raise InvalidSampling(
            f"sampling holds {', '.join(unknown)}, which this reader does not know; "
            "take it out if it does not change what is drawn"
        )
    beside = {name: fields[name] for name in SHAPING if _given(fields, name)}
    stated = {name: value for name, value in inner.items() if value is not None and name not in _SHAPELESS}
    for name in beside.keys() & stated.keys():
        if beside[name] != stated[name]:
            raise InvalidSampling(f"{name} is {beside[name]!r} on the line and {stated[name]!r} in sampling")
    stated |= beside
    if stated.get("top_k") == -1:
        stated["top_k"] = 0  # vLLM's older word for keeping all
    return stated


def _sampling(default: SamplingParams, stated: Fields) -> SamplingParams:
    values = {**msgspec.structs.asdict(default), **stated}
    try:
        return msgspec.convert(values, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidSampling(str(error)) from error


def _kind(fields: Fields) -> LogprobKind | None:
    """`processed` or `raw`; vLLM's own words are longer."""
    word = _text(fields, "logprobs_mode") or _text(fields, "kind")
    if word is None:
        return None
    try:
        return LogprobKind(word.removesuffix("_logprobs"))
    except ValueError:
        raise InvalidValue(f"the kind of logprobs is {word!r}; write processed or raw") from None


def _finish_reason(fields: Fields) -> FinishReason | None:
    """Other words than ours (`tool_calls`) say less than the last token does."""
    word = _text(fields, "finish_reason")
    return FinishReason(word) if word in set(FinishReason) else None


def _text(fields: Fields, name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidValue(f"{name} is {value!r}; it is a text")
    return value


def _label(fields: Fields) -> str | None:
    """A version is a name or a number."""
    value = fields.get("version")
    if value is not None and not isinstance(value, str | int):
        raise InvalidValue(f"version is {value!r}; it is a text or a whole number")
    return None if value is None else str(value)


def _given(fields: Fields, name: str) -> bool:
    return fields.get(name) is not None


def _list(fields: Fields, *names: str) -> tuple[Any, ...]:
    """The list under one of `names`."""
    present = [name for name in names if name in fields]
    if len(present) != 1:
        what = " and ".join(present) if present else f"no {' or '.join(names)}"
        raise RecordError(f"the line has {what}; it needs one")
    value = fields[present[0]]
    if not isinstance(value, list):
        raise RecordError(f"{present[0]} is {type(value).__name__}; it is a list with one entry per token")
    return tuple(value)

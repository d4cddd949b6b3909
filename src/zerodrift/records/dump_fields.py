"""What stands in the fields of a recorded line, taken out one by one: each is what it must be, or the line is refused."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.errors import InvalidSampling, InvalidValue, RecordError
from zerodrift.core.request import SHAPING, SamplingParams
from zerodrift.records.recorded import NO_LOGPROB, Message

Fields = Mapping[str, Any]
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


class LinePlace(NamedTuple):
    """Where a line stands, and what its silence about sampling means."""

    source: str
    line: int
    default: SamplingParams
    given: frozenset[str] = frozenset()
    """Names of the defaults that somebody vouches for."""


def runs_of(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of true flags."""
    begin = 0
    for flag, run in groupby(flags):
        end = begin + len(list(run))
        if flag:
            yield begin, end
        begin = end


def stated_parameters(fields: Fields) -> dict[str, Any]:
    """Sampling parameters out of a `sampling` object and beside it; null says nothing."""
    inner = fields.get("sampling") or {}
    if not isinstance(inner, dict):
        raise InvalidSampling(f"sampling is {inner!r}; write an object, as {{'temperature': 0.7}}")
    if unknown := sorted(inner.keys() - set(SamplingParams.__struct_fields__) - _SHAPELESS):
        raise InvalidSampling(
            f"sampling holds {', '.join(unknown)}, which this reader does not know; "
            "take it out if it does not change what is drawn"
        )
    beside = {name: fields[name] for name in SHAPING if is_given(fields, name)}
    stated = {name: value for name, value in inner.items() if value is not None and name not in _SHAPELESS}
    for name in beside.keys() & stated.keys():
        if beside[name] != stated[name]:
            raise InvalidSampling(f"{name} is {beside[name]!r} on the line and {stated[name]!r} in sampling")
    stated |= beside
    if stated.get("top_k") == -1:
        stated["top_k"] = 0  # vLLM's older word for keeping all
    return stated


def sampling_of(default: SamplingParams, stated: Fields) -> SamplingParams:
    values = {**msgspec.structs.asdict(default), **stated}
    try:
        return msgspec.convert(values, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidSampling(str(error)) from error


def kind_of(fields: Fields) -> LogprobKind | None:
    """`processed` or `raw`; vLLM's own words are longer."""
    word = text_of(fields, "logprobs_mode") or text_of(fields, "kind")
    if word is None:
        return None
    try:
        return LogprobKind(word.removesuffix("_logprobs"))
    except ValueError:
        raise InvalidValue(f"the kind of logprobs is {word!r}; write processed or raw") from None


def finish_reason_of(fields: Fields) -> FinishReason | None:
    """Other words than ours (`tool_calls`) say less than the last token does."""
    word = text_of(fields, "finish_reason")
    return FinishReason(word) if word in set(FinishReason) else None


def text_of(fields: Fields, name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidValue(f"{name} is {value!r}; it is a text")
    return value


def label_of(fields: Fields) -> str | None:
    """A version is a name or a number."""
    value = fields.get("version")
    if value is not None and not isinstance(value, str | int):
        raise InvalidValue(f"version is {value!r}; it is a text or a whole number")
    return None if value is None else str(value)


def is_given(fields: Fields, name: str) -> bool:
    return fields.get(name) is not None


def listed(fields: Fields, *names: str) -> tuple[Any, ...]:
    """The list under one of `names`."""
    present = [name for name in names if name in fields]
    if len(present) != 1:
        what = " and ".join(present) if present else f"no {' or '.join(names)}"
        raise RecordError(f"the line has {what}; it needs one")
    value = fields[present[0]]
    if not isinstance(value, list):
        raise RecordError(f"{present[0]} is {type(value).__name__}; it is a list with one entry per token")
    return tuple(value)


class Numbers(NamedTuple):
    """Logprobs, and whether they stand in the dump with the other sign."""

    values: tuple[Any, ...]
    sign_turned: bool = False


def numbers_of(values: tuple[Any, ...]) -> Numbers:
    """Numbers as they are; those of a line that are all above zero, with a minus sign.

    They may be −log p or p: that is for the checkpoint to tell, and is told. A line of both signs is neither.
    """
    known = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(known) < len(values) or not values or min(known) < 0 or max(known) <= NO_LOGPROB:
        return Numbers(values)
    return Numbers(tuple(-each for each in known), sign_turned=True)


def messages_of(fields: Fields) -> tuple[Message, ...]:
    """The conversation before the output, where it is one of texts; anything else (images, tools) is not understood here,
    and a prompt has its ids."""
    value = fields.get("messages", fields.get("prompt"))
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return ()
    turns = [Message(each.get("role"), each.get("content")) for each in value]
    while turns and turns[-1].role == "assistant":
        turns.pop()
    understood = all(isinstance(part, str) for turn in turns for part in turn)
    return tuple(turns) if understood else ()


def prompt_text_of(fields: Fields) -> str | None:
    """The prompt as text, where the line has it beside the ids."""
    value = fields.get("prompt_text", fields.get("prompt"))
    return value if isinstance(value, str) else None

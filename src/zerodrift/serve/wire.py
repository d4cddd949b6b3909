"""Bodies of requests, as types: what is not written here is refused by its name. Torch-free.

A field that is null is as one that was left out, since clients write out what they do not set.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from zerodrift.core.errors import InvalidValue
from zerodrift.serve.errors import CallRefused
from zerodrift.serve.limits import MOST_CHARACTERS, MOST_PARTS
from zerodrift.serve.parameters import (
    CHAT,
    GENERATE,
    OPENAI,
    SAMPLING,
    TEXT,
    ParameterRow,
    refused_in,
    without_refused,
)

Name = Annotated[str, Meta(min_length=1, max_length=MOST_CHARACTERS)]
Count = Annotated[int, Meta(ge=0, le=2**31)]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of one route. Read once, where it came in, and made into values that nobody can change."""

    refused: ClassVar[Mapping[str, ParameterRow]] = {}
    """Fields that clients of vLLM know, and that are taken with a value that asks for nothing alone."""


class SamplingBody(Body, kw_only=True):
    """What all routes that generate have in common."""

    n: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    min_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    prompt_logprobs: Count | None = None


class StreamOptions(Body, kw_only=True):
    """Of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """/v1/completions."""

    refused: ClassVar[Mapping[str, ParameterRow]] = refused_in(SAMPLING, OPENAI)

    prompt: str | list[Any]
    """A text, ids, or a list of those."""
    model: Name | None = None
    logprobs: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Name | None = None
    request_id: Name | None = None


class TextPart(Body, kw_only=True):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Body, kw_only=True):
    """One of a conversation."""

    role: Name
    content: str | list[TextPart]
    name: Name | None = None

    @property
    def as_template_sees_it(self) -> dict[str, str]:
        """Pieces joined."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class Chat(SamplingBody, kw_only=True):
    """/v1/chat/completions."""

    refused: ClassVar[Mapping[str, ParameterRow]] = refused_in(SAMPLING, OPENAI, CHAT)

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: Name | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[Name, bool | int | float | str | None] | None = None
    cache_salt: Name | None = None
    request_id: Name | None = None


class VllmSampling(SamplingBody, kw_only=True):
    """`sampling_params` of /inference/v1/generate."""

    refused: ClassVar[Mapping[str, ParameterRow]] = refused_in(SAMPLING)

    logprobs: Count | None = None
    output_kind: Annotated[int, Meta(ge=0, le=2)] | None = None
    routed_experts_prompt_start: Count | None = None
    """Of what is not reported."""


_REFUSED_OF_IDS = {**VllmSampling.refused, **TEXT}


class GenerateBody(Body, kw_only=True):
    """/inference/v1/generate."""

    refused: ClassVar[Mapping[str, ParameterRow]] = refused_in(GENERATE)

    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: VllmSampling
    model: Name | None = None
    request_id: Name | None = None
    cache_salt: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] | None = None


class Score(Body, kw_only=True):
    """/v1/token_logprobs."""

    token_ids: Annotated[list[Annotated[list[int], Meta(min_length=2)]], Meta(min_length=1)]
    """Sequences, each of two tokens or more."""
    model: Name | None = None
    top_logprobs: Count | None = None
    cache_salt: Name | None = None


class Tokenize(Body, kw_only=True):
    """/tokenize."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    model: Name | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[Name, bool | int | float | str | None] | None = None


B = TypeVar("B", bound=Body)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def read_body(content: bytes, kind: type[B]) -> B:
    """`content` as one of ours, or what is wrong with it by name."""
    _check_parts(content)
    try:
        told = msgspec.json.decode(content) if content else {}
        # Of a key that stands twice parsers take one, and not all the same one: what was meant is not known.
        json.loads(content or b"{}", object_pairs_hook=_each_once)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"is no JSON: {error}"
        raise CallRefused(400, f"the body {what}", code="body/not-json") from error
    if not isinstance(told, dict):
        raise CallRefused(
            400, f"the body is a JSON {type(told).__name__}; send an object", code="body/not-an-object"
        )
    return as_body(told, kind)


def _check_parts(content: bytes) -> None:
    """What parsers make one by one is counted at the speed of memory; what stands in strings is no part."""
    if _parts(content) > MOST_PARTS and _parts(_STRING.sub(b"", content)) > MOST_PARTS:
        raise CallRefused(
            400,
            f"a body has at most {MOST_PARTS} lists, objects and members of objects; send several requests",
            code="limit",
        )


def _parts(content: bytes) -> int:
    return sum(map(content.count, (b"[", b"{", b":")))


def _each_once(pairs: Sequence[tuple[str, Any]]) -> None:
    """Refuse a key that stands twice in one object."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise CallRefused(
                400,
                f"{name[:80]!r} stands twice in one object; send it once",
                code="body/key-twice",
                param=name[:80],
            )
        seen.add(name)


def as_body(told: Mapping[str, Any], kind: type[B]) -> B:
    """An object as one of ours."""
    fields = without_refused(told, kind.refused)
    if kind is GenerateBody and isinstance(inner := fields.get("sampling_params"), dict):
        refused = VllmSampling.refused if fields.get("output_mode") == "text" else _REFUSED_OF_IDS
        fields["sampling_params"] = without_refused(inner, refused, "sampling_params.")
    if unknown := sorted(fields.keys() - {*kind.__struct_fields__}):
        near = difflib.get_close_matches(unknown[0][:80], kind.__struct_fields__, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise CallRefused(
            400,
            f"{unknown[0][:80]!r} is no field of this route{hint}",
            code="body/unknown-field",
            param=unknown[0][:80],
        )
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except (msgspec.ValidationError, InvalidValue, RecursionError) as error:
        raise CallRefused(400, f"the body cannot be read: {str(error)[:400]}", code="body/invalid") from error

"""Which samples of a server can be believed?

Adapters say what came in the words of `ToldSample`, and here it becomes a `Completion`, so that all engines share one idea of a
bad answer: every token has its id and a finite logprob of its own. A sample that does not is a `Problem` with the code of
the error; an answer that cannot be told apart into samples raises BadAnswer.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from zerodrift.backends.json_path import look_up
from zerodrift.core.completion import (
    Answer,
    Completion,
    FinishReason,
    LogprobKind,
    Problem,
    TokenAlternative,
    check_logprobs,
)
from zerodrift.core.errors import BadAnswer, InvalidCompletion, NonFinite, ZerodriftError
from zerodrift.core.request import Request
from zerodrift.core.version import VersionSpan

Shape = TypeVar("Shape")
Raw = TypeVar("Raw")

Pairs = Sequence[tuple[int, float | None]]
"""Tokens and their logprobs, likeliest first."""


class ToldSample(msgspec.Struct, kw_only=True):
    """One sample, as the server told it."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    owners: Sequence[int] | None
    """The tokens that the logprobs belong to; None where the server does not name them by id."""
    logprobs: Sequence[float | None]
    top_logprobs: Sequence[Pairs] | None
    """None where the answer has no room for them."""
    prompt_logprobs: Sequence[float | None] = ()
    kind: LogprobKind
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    cached_tokens: int | None
    text: str | None
    prompt_tokens: int | None = None
    """How many tokens the server saw in the prompt, where that is all that it tells of them."""
    made: int | None = None
    """How many tokens the server made, by its own count; None where it does not tell."""
    lost: str = "the engine documents no reason for that"
    """Why there may be fewer logprobs than tokens."""


def parse(answer: object, shape: type[Shape], where: str) -> Shape:
    """`answer` as `shape`, or BadAnswer."""
    try:
        return msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        raise BadAnswer(
            f"{where} answered in an unknown shape ({error}); is it the kind of server that it is taken for?"
        ) from error


def value_at(answer: object, path: str, shape: type[Shape], where: str) -> Shape:
    """What is at `path` of the answer (see json_path), or BadAnswer."""
    return parse(look_up(answer, path), shape, f"{where} ({path})")


def bind_samples(
    numbered: Sequence[tuple[int, Raw]],
    request: Request,
    where: str,
    read: Callable[[Raw], ToldSample],
    digest: str,
) -> Answer:
    """Every sample of one request, in order of its index; one that cannot be read is a `Problem` of its own."""
    expected, by_index = range(request.sampling.n), dict(numbered)
    if len(numbered) != len(expected) or set(by_index) != set(expected):
        raise BadAnswer(
            f"{where} was asked for {len(expected)} samples and answered with {len(numbered)}, of the indices "
            f"{sorted(by_index)}; each must come once"
        )
    completions, problems = [], []
    for index in expected:
        try:
            completions.append(_completion(read(by_index[index]), request, index, digest))
        except ZerodriftError as error:
            problems.append(Problem(error.code, f"sample {index}: {error}"))
    return Answer(tuple(completions), tuple(problems))


def _completion(sample: ToldSample, request: Request, index: int, digest: str) -> Completion:
    if sample.prompt_tokens not in (None, sent := len(request.prompt.token_ids)):
        raise InvalidCompletion(
            f"{sent} prompt tokens were sent and the engine saw {sample.prompt_tokens}; it added or dropped some, "
            "a BOS perhaps"
        )
    # Ids that are left out between others leave no gap.
    if sample.made not in (None, came := len(sample.token_ids)):
        raise InvalidCompletion(f"the engine made {sample.made} tokens and sent {came}: {sample.lost}")
    if len(sample.logprobs) < came:
        raise InvalidCompletion(f"{came} tokens carry {len(sample.logprobs)} logprobs: {sample.lost}")
    if sample.owners is not None and list(sample.owners) != list(sample.token_ids):
        raise InvalidCompletion(
            f"the engine sampled {shorten(sample.token_ids)} and reports logprobs of {shorten(sample.owners)}; "
            "they belong to other tokens"
        )
    return Completion(
        prompt_token_ids=tuple(sample.prompt_token_ids),
        token_ids=tuple(sample.token_ids),
        logprobs=tuple(map(number, sample.logprobs)),
        kind=sample.kind,
        sampling=request.sampling,
        finish_reason=sample.finish_reason,
        versions=sample.versions,
        fingerprint=digest,
        sample_index=index,
        top_logprobs=_alternatives(sample, request.sampling.logprobs or 0),
        prompt_logprobs=tuple(sample.prompt_logprobs),
        cached_tokens=sample.cached_tokens,
        text=sample.text,
    )


def _alternatives(sample: ToldSample, count: int) -> tuple[tuple[TokenAlternative, ...], ...]:
    """The `count` likeliest tokens at each position; fewer where truncation left fewer."""
    if count == 0:
        return ()
    if sample.top_logprobs is None:
        raise BadAnswer(f"{count} alternatives were asked for, and the sample has none")
    if len(sample.top_logprobs) != len(sample.token_ids):
        raise InvalidCompletion(
            f"{len(sample.token_ids)} tokens carry alternatives for {len(sample.top_logprobs)}"
        )
    return tuple(_ranked(pairs, count) for pairs in sample.top_logprobs)


def _ranked(pairs: Pairs, count: int) -> tuple[TokenAlternative, ...]:
    ids = [token for token, _ in pairs]
    if len(ids) > count or len(set(ids)) < len(ids):
        raise InvalidCompletion(f"{count} alternatives were asked for and {shorten(ids)} came")
    ranked = tuple(TokenAlternative(token, number(value)) for token, value in pairs)
    check_logprobs("top_logprobs", (each.logprob for each in ranked))
    if any(likelier.logprob < rarer.logprob for likelier, rarer in itertools.pairwise(ranked)):
        raise InvalidCompletion("alternatives are not in order of likelihood")
    return ranked


def scores(values: Iterable[float | None]) -> list[float]:
    """Logprobs of given tokens, if they can be that."""
    found = [number(value) for value in values]
    check_logprobs("prompt_logprobs", found)
    return found


def number(value: float | None) -> float:
    """A logprob, which may still be none that is possible."""
    if value is None:
        raise NonFinite("a logprob is null, which is how JSON writers spell NaN; look for NaN in the weights")
    return value


def shorten(ids: Iterable[int] | None) -> str:
    """Ids for a message."""
    shown = str(ids if ids is None else list(ids))
    return shown if len(shown) <= 60 else f"{shown[:60]}…"

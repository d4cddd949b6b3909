"""Which of vLLM's answers can be believed?

What comes back becomes a `Completion` only if every token has its id and a finite logprob of its own. A sample that does
not is a `Problem` with the code of the error; an answer that cannot be told apart into samples raises BadAnswer.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from zerodrift.backends.server import UNKNOWN, bind_samples, shorten
from zerodrift.core.completion import (
    Answer,
    Completion,
    FinishReason,
    LogprobKind,
    Problem,
    TokenAlternative,
    check_logprobs,
)
from zerodrift.core.errors import BadAnswer, InvalidCompletion, NonFinite
from zerodrift.core.request import Request
from zerodrift.core.version import VersionSpan, WeightVersion

Shape = TypeVar("Shape")

NEVER = -9998.0
"""vLLM writes -9999 for -inf: in a list of alternatives, a token that truncation excluded."""

PREFIX = "token_id:"


class _PromptLogprob(msgspec.Struct):
    logprob: float | None


class Logprobs(msgspec.Struct):
    """What is said of each sampled token."""

    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None]


class Span(msgspec.Struct):
    """Tokens that one version of the weights made."""

    version: str
    start: int
    end: int


class _Indexed(msgspec.Struct):
    index: int


class AnyChoice(_Indexed):
    """What every route says of a sample."""

    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None
    weight_versions: list[Span] | None = None
    """None where the route, or the release, does not say."""


class Choice(AnyChoice):
    """One sample, in the words of /v1/completions."""

    text: str | None = None
    logprobs: Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What was counted."""

    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class Response(msgspec.Struct):
    """One answer; choices stay raw, so that one bad choice does not spoil its neighbours."""

    choices: list[dict[str, Any]]
    usage: Usage | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens from the prefix cache; None without --enable-prompt-tokens-details."""
        details = self.usage.prompt_tokens_details if self.usage else None
        return details.cached_tokens if details else None


class VllmReader(msgspec.Struct, frozen=True):
    """Reads the answers of one route; what a completion must carry and its choice does not say."""

    path: str
    choice: Callable[[Mapping[str, Any]], Choice]
    kind: LogprobKind
    version: WeightVersion
    fingerprint: str

    def answer(self, answer: object | None, request: Request) -> Answer:
        """Every sample of one request, in order of its index; `answer` None stands for a NaN that cannot be written."""
        if answer is None:
            problem = Problem(
                NonFinite.code, "the engine computed NaN and could not write it; look for NaN in its weights"
            )
            return Answer((), (problem,) * request.sampling.n)
        response = parse(answer, Response, self.path)
        numbered = [(parse(choice, _Indexed, self.path).index, choice) for choice in response.choices]
        return bind_samples(
            numbered,
            request,
            self.path,
            lambda raw, _: self._completion(self.choice(raw), request, response.cached_tokens),
        )

    def _completion(self, choice: Choice, request: Request, cached_tokens: int | None) -> Completion:
        if choice.token_ids is None or choice.prompt_token_ids is None:
            raise InvalidCompletion(
                "the engine returned no token ids, or counted others than the prompt's; it must honour return_token_ids"
            )
        if choice.logprobs is None:
            raise InvalidCompletion("the sample carries no logprobs; ask for them with logprobs=0 or more")
        sampling, logprobs = request.sampling, choice.logprobs
        _check_tokens(choice.token_ids, logprobs.tokens)
        return Completion(
            prompt_token_ids=tuple(choice.prompt_token_ids),
            token_ids=tuple(choice.token_ids),
            logprobs=tuple(_number(value) for value in logprobs.token_logprobs),
            kind=self.kind,
            sampling=sampling,
            finish_reason=_finish_reason(choice.finish_reason),
            versions=self._versions(choice),
            fingerprint=self.fingerprint,
            sample_index=choice.index,
            top_logprobs=_alternatives(choice.token_ids, logprobs.top_logprobs, sampling.logprobs or 0),
            prompt_logprobs=_prompt_logprobs(choice) if sampling.prompt_logprobs is not None else (),
            cached_tokens=cached_tokens,
            text=choice.text,
        )

    def _versions(self, choice: Choice) -> tuple[VersionSpan, ...]:
        """As the server says; what it calls its weights now, where it says nothing.

        Two updates between two tokens leave a span without a token in between.
        """
        if choice.weight_versions is None:
            return (VersionSpan(self.version, 0, len(choice.token_ids)),) if choice.token_ids else ()
        return tuple(
            VersionSpan(WeightVersion(span.version) if span.version else UNKNOWN, span.start, span.end)
            for span in choice.weight_versions
            if span.start != span.end
        )


def parse(answer: object, shape: type[Shape], where: str) -> Shape:
    """`answer` as `shape`, or BadAnswer."""
    try:
        return msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"{where} answered in an unknown shape ({error}); is this a vLLM server?") from error


def read_scores(answer: object, token_ids: tuple[int, ...], path: str) -> list[float]:
    """Raw logprobs of tokens 1… of the sequence that was sent."""
    response = parse(answer, Response, path)
    choice = parse(response.choices[0] if response.choices else None, Choice, path)
    if choice.prompt_token_ids != list(token_ids):
        raise BadAnswer(
            f"the engine was sent {len(token_ids)} token ids and scored others: {shorten(choice.prompt_token_ids)}"
        )
    return [value for value in _prompt_logprobs(choice)[1:] if value is not None]


def _check_tokens(token_ids: list[int], named: list[str]) -> None:
    """The logprobs belong to the sampled tokens, where the server names tokens by id as it was asked to."""
    if all(name.startswith(PREFIX) for name in named):
        owners = [token_id(name) for name in named]
        if owners != token_ids:
            raise InvalidCompletion(
                f"the engine sampled {shorten(token_ids)} and reports logprobs of {shorten(owners)}; "
                "they belong to other tokens"
            )


def _alternatives(
    token_ids: list[int], entries: list[dict[str, float | None] | None], count: int
) -> tuple[tuple[TokenAlternative, ...], ...]:
    """The `count` likeliest tokens at each position, likeliest first; fewer where truncation left fewer."""
    if count == 0:
        return ()
    if len(entries) != len(token_ids):
        raise InvalidCompletion(f"{len(token_ids)} tokens carry alternatives for {len(entries)}")
    return tuple(_likeliest(sampled, entry, count) for sampled, entry in zip(token_ids, entries, strict=True))


def _likeliest(
    sampled: int, entry: dict[str, float | None] | None, count: int
) -> tuple[TokenAlternative, ...]:
    if not entry:
        raise InvalidCompletion(f"token {sampled} carries no alternatives, although {count} were asked for")
    found = {token_id(name): _number(value) for name, value in entry.items()}
    # The sampled token comes on top of the `count` where it is not one of them.
    if len(found) > count + (sampled in found):
        raise InvalidCompletion(f"token {sampled} carries {len(found)} alternatives; {count} were asked for")
    # Written so that NaN, which compares false with everything, is kept and found out.
    kept = [TokenAlternative(token, logprob) for token, logprob in found.items() if not logprob <= NEVER]
    check_logprobs("top_logprobs", (alternative.logprob for alternative in kept))
    return tuple(sorted(kept, key=lambda alternative: (-alternative.logprob, alternative.token_id)))[:count]


def _prompt_logprobs(choice: Choice) -> tuple[float | None, ...]:
    """Of each token of the prompt its own; the first has none."""
    ids, entries = choice.prompt_token_ids or [], choice.prompt_logprobs
    if entries is None or len(entries) != len(ids):
        raise InvalidCompletion(
            f"{len(ids)} prompt tokens carry {None if entries is None else len(entries)} prompt logprobs"
        )
    values: list[float | None] = [None]
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        own = (entry or {}).get(str(token))
        if own is None:
            raise InvalidCompletion(f"the prompt logprobs have no entry for their own token {token}")
        values.append(_number(own.logprob))
    check_logprobs("prompt_logprobs", (value for value in values if value is not None))
    return tuple(values)


def _number(value: float | None) -> float:
    if value is None:
        raise NonFinite("a logprob is null, which is how JSON writers spell NaN; look for NaN in the weights")
    return value


def token_id(name: str) -> int:
    """Of `token_id:5` the 5."""
    digits = name.removeprefix(PREFIX)
    if digits == name or not digits.isdecimal():
        raise BadAnswer(f"the engine names a token {name!r}; it must honour return_tokens_as_token_ids")
    return int(digits)


def _finish_reason(word: str | None) -> FinishReason:
    try:
        return FinishReason(word or "")
    except ValueError:
        raise BadAnswer(f"the engine finished for the reason {word!r}, which we do not know") from None

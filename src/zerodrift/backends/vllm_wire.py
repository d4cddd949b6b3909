"""What does vLLM's completion call look like, and which of its answers can be believed?

Requests go out as trainers send them; what comes back becomes a `Completion` only if every token has its id and a
finite logprob of its own. A sample that does not is a `Problem` with the code of the error; an answer that cannot
be told apart into samples raises BadAnswer.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from zerodrift.backends.pieces import Streaming
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
from zerodrift.core.request import Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion

Shape = TypeVar("Shape")

PATH = "/v1/completions"
UNKNOWN = WeightVersion("unknown")

ALWAYS_SENT = ("temperature", "max_tokens", "seed", "n", "logprobs")
"""What every trainer states; the rest is left to the server's defaults unless it was asked for."""

NAN_REFUSAL = "Out of range float values are not JSON compliant"
"""vLLM's answer to its own NaN: it fails to write the number, and blames the request for it with a 400."""

NEVER = -9998.0
"""vLLM writes -9999 for -inf: in a list of alternatives, a token that truncation excluded."""

ONE_ALTERNATIVE = 1
"""What `logprobs` asks for one alternative."""

MUST_READ = ("return_tokens_as_token_ids",)
"""Flags without which alternatives have no ids."""

CLOSED: frozenset[int] = frozenset()
"""Statuses that mean that the route is switched off: this one cannot be."""

STREAMING = Streaming(
    # Without usage, nothing would say what came from the prefix cache.
    ask={"stream": True, "stream_options": {"include_usage": True}},
    samples="choices",
    index="index",
    lists={
        name: name
        for name in ("token_ids", "logprobs/tokens", "logprobs/token_logprobs", "logprobs/top_logprobs")
    },
    text="text",
    finish="finish_reason",
)
"""Differences, of as many tokens as --stream-interval says; ids of the prompt come with the first."""

_PREFIX = "token_id:"


class PromptLogprob(msgspec.Struct):
    """One token in an entry of prompt_logprobs, which is keyed by ids."""

    logprob: float | None


PromptEntries = list[dict[str, PromptLogprob] | None]


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None]


class Indexed(msgspec.Struct):
    """A choice, of which only its place is read."""

    index: int


class _Choice(Indexed):
    finish_reason: str | None
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: PromptEntries | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What was counted."""

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


class Context(msgspec.Struct, frozen=True):
    """What a completion must carry and its choice does not say."""

    kind: LogprobKind
    version: WeightVersion
    fingerprint: str
    cached_tokens: int | None = None


def request_body(request: Request, model: str, *, explicit: bool) -> dict[str, object]:
    """The JSON of one completion call.

    `explicit` sends every sampling parameter. Without it those that keep their default stay out, as in most
    trainers, and the server fills them in from wherever it likes: that is the fault to be found.
    """
    body: dict[str, object] = {
        "model": model,
        "prompt": request.prompt.token_ids,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    body |= sampling_fields(request.sampling, explicit=explicit)
    if request.prompt.cache_salt is not None:
        body["cache_salt"] = request.prompt.cache_salt
    return body


def sampling_fields(sampling: SamplingParams, *, explicit: bool) -> dict[str, Any]:
    """What is said of the distribution, under vLLM's names, which are ours."""
    defaults = SamplingParams()
    found = {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__}
    return {
        name: value
        for name, value in found.items()
        if value is not None and (explicit or name in ALWAYS_SENT or value != getattr(defaults, name))
    }


def score_body(token_ids: tuple[int, ...], model: str) -> dict[str, object]:
    """A call that scores its own prompt. vLLM cannot generate nothing, so one greedy token is thrown away."""
    return {
        "model": model,
        "prompt": token_ids,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }


def probe_body(model: str, extra: Mapping[str, object]) -> dict[str, object]:
    """The smallest call, with what is to be found out."""
    prompt = {"prompt": [0, 0], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    return {"model": model, **prompt, **extra}


def parse(answer: object, shape: type[Shape], where: str) -> Shape:
    """`answer` as `shape`, or BadAnswer."""
    try:
        return msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"{where} answered in an unknown shape ({error}); is this a vLLM server?") from error


def read_answer(answer: object | None, request: Request, context: Context) -> Answer:
    """Every sample of one request, in order of its index; `answer` None stands for NAN_REFUSAL."""
    return read_samples(answer, request, context, PATH, _completion)


def read_samples(
    answer: object | None,
    request: Request,
    context: Context,
    where: str,
    completion: Callable[[Mapping[str, Any], Request, Context], Completion],
) -> Answer:
    """As `read_answer`, of any route whose answers hold `choices`: `completion` reads one of them."""
    if answer is None:
        problem = Problem(
            NonFinite.code, "the engine computed NaN and could not write it; look for NaN in its weights"
        )
        return Answer((), (problem,) * request.sampling.n)
    response = parse(answer, Response, where)
    by_index = {parse(choice, Indexed, where).index: choice for choice in response.choices}
    expected = range(request.sampling.n)
    if len(response.choices) != len(expected) or set(by_index) != set(expected):
        raise BadAnswer(
            f"{where} was asked for {len(expected)} samples and answered with {len(response.choices)}, "
            f"of the indices {sorted(by_index)}; each must come once"
        )
    context = msgspec.structs.replace(context, cached_tokens=response.cached_tokens)
    completions = []
    problems = []
    for index in expected:
        try:
            completions.append(completion(by_index[index], request, context))
        except ZerodriftError as error:
            problems.append(Problem(error.code, f"sample {index}: {error}"))
    return Answer(tuple(completions), tuple(problems))


def read_scores(answer: object, token_ids: tuple[int, ...]) -> list[float]:
    """Raw logprobs of tokens 1… of the sequence that was sent."""
    response = parse(answer, Response, PATH)
    choice = parse(response.choices[0] if response.choices else None, _Choice, PATH)
    if choice.prompt_token_ids != list(token_ids):
        raise BadAnswer(
            f"the engine was sent {len(token_ids)} token ids and scored others: "
            f"{_shorten(choice.prompt_token_ids)}"
        )
    scores = prompt_logprobs(choice.prompt_token_ids, choice.prompt_logprobs)
    return [value for value in scores[1:] if value is not None]


def _completion(raw: Mapping[str, Any], request: Request, context: Context) -> Completion:
    choice = parse(raw, _Choice, PATH)
    if choice.token_ids is None or choice.prompt_token_ids is None:
        raise InvalidCompletion("the engine returned no token ids; it must honour return_token_ids")
    if choice.logprobs is None:
        raise InvalidCompletion("the sample carries no logprobs; ask for them with logprobs=0 or more")
    sampling, logprobs = request.sampling, choice.logprobs
    token_ids = tuple(choice.token_ids)
    _check_tokens(choice.token_ids, logprobs.tokens)
    return Completion(
        prompt_token_ids=tuple(choice.prompt_token_ids),
        token_ids=token_ids,
        logprobs=tuple(number(value) for value in logprobs.token_logprobs),
        kind=context.kind,
        sampling=sampling,
        finish_reason=finish_reason(choice.finish_reason),
        versions=one_version(context.version, len(token_ids)),
        fingerprint=context.fingerprint,
        sample_index=choice.index,
        top_logprobs=_alternatives(choice.token_ids, logprobs.top_logprobs, sampling.logprobs or 0),
        prompt_logprobs=prompt_logprobs(choice.prompt_token_ids, choice.prompt_logprobs)
        if sampling.prompt_logprobs is not None
        else (),
        cached_tokens=context.cached_tokens,
        text=choice.text,
    )


def one_version(version: WeightVersion, count: int) -> tuple[VersionSpan, ...]:
    """All `count` tokens were made by `version`."""
    return (VersionSpan(version, 0, count),) if count else ()


def _check_tokens(token_ids: list[int], named: list[str]) -> None:
    """The logprobs belong to the sampled tokens, where the server names tokens by id as it was asked to."""
    if named and all(name.startswith(_PREFIX) for name in named):
        owners = [token_id(name) for name in named]
        if owners != token_ids:
            raise InvalidCompletion(
                f"the engine sampled {_shorten(token_ids)} and reports logprobs of {_shorten(owners)}; "
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
    return tuple(_ranked(sampled, entry, count) for sampled, entry in zip(token_ids, entries, strict=True))


def _ranked(sampled: int, entry: dict[str, float | None] | None, count: int) -> tuple[TokenAlternative, ...]:
    if entry is None:
        raise InvalidCompletion(f"token {sampled} carries no alternatives, although {count} were asked for")
    found = {token_id(name): number(value) for name, value in entry.items()}
    if len(found) > count:
        # The sampled token comes first, and on top of the `count` where it is not one of them.
        found.pop(sampled, None)
    if len(found) > count:
        raise InvalidCompletion(f"token {sampled} carries {len(found)} alternatives; {count} were asked for")
    return likeliest(found)


def likeliest(found: Mapping[int, float]) -> tuple[TokenAlternative, ...]:
    """Alternatives in order; those that truncation excluded are none."""
    # Written so that NaN, which compares false with everything, is kept and found out.
    kept = [TokenAlternative(token, logprob) for token, logprob in found.items() if not logprob <= NEVER]
    check_logprobs("top_logprobs", (alternative.logprob for alternative in kept))
    return tuple(sorted(kept, key=lambda alternative: (-alternative.logprob, alternative.token_id)))


def prompt_logprobs(ids: list[int], entries: PromptEntries | None) -> tuple[float | None, ...]:
    """Of each token of the prompt its own; the first has none."""
    if entries is None or len(entries) != len(ids):
        raise InvalidCompletion(
            f"{len(ids)} prompt tokens carry {None if entries is None else len(entries)} prompt logprobs"
        )
    values: list[float | None] = [None]
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        own = (entry or {}).get(str(token))
        if own is None:
            raise InvalidCompletion(f"the prompt logprobs have no entry for their own token {token}")
        values.append(number(own.logprob))
    check_logprobs("prompt_logprobs", (value for value in values if value is not None))
    return tuple(values)


def number(value: float | None) -> float:
    """Null is no number."""
    if value is None:
        raise NonFinite("a logprob is null, which is how JSON writers spell NaN; look for NaN in the weights")
    return value


def token_id(name: str) -> int:
    """Of `token_id:5` the 5."""
    digits = name.removeprefix(_PREFIX)
    if digits == name or not digits.isdecimal():
        raise BadAnswer(f"the engine names a token {name!r}; it must honour return_tokens_as_token_ids")
    return int(digits)


def finish_reason(word: str | None) -> FinishReason:
    """The word that every route of vLLM says."""
    try:
        return FinishReason(word or "")
    except ValueError:
        raise BadAnswer(f"the engine finished for the reason {word!r}, which we do not know") from None


def _shorten(ids: list[int] | None) -> str:
    shown = str(ids)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"

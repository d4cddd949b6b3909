"""The two routes by which vLLM generates from ids: how each is asked, and what it answers.

`/v1/completions` is OpenAI's. `/inference/v1/generate` takes vLLM's own sampling parameters, so that
generation_config.json has nothing to fill in but max_tokens, which we always send; its answers carry ids as numbers,
and the versions of the weights that made each token, by the server's own account.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from zerodrift.backends.http import Reply
from zerodrift.backends.samples import Pairs, number, parse, scores
from zerodrift.backends.server import stated
from zerodrift.backends.stream_deltas import Streaming
from zerodrift.core.completion import FinishReason
from zerodrift.core.errors import BadAnswer, EngineRefused, InvalidCompletion
from zerodrift.core.request import Request, SamplingParams

NAN_REFUSAL = "Out of range float values are not JSON compliant"
"""vLLM's answer to its own NaN: it fails to write the number, and blames the request for it with a 400."""
NOTHING = -9998.0
"""vLLM writes -9999 for -inf: in a list of alternatives, a token that truncation excluded."""
PREFIX = "token_id:"
FLAG = "--enable-scale-out"
"""Without it releases from 0.30 on answer 403 to /inference; those before have the route, and do not know the flag."""

# Without usage, nothing would say what came from the prefix cache.
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class _PromptLogprob(msgspec.Struct):
    logprob: float | None


class Span(msgspec.Struct):
    """Tokens that one version of the weights made."""

    version: str
    start: int
    end: int
    digest: str | None = None
    """Of the tensors themselves: `zerodrift serve` tells it, vLLM does not."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What was counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """Over all samples."""
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens from the prefix cache; None without --enable-prompt-tokens-details."""
        details = self.prompt_tokens_details
        return details.cached_tokens if details else None


class Choice(msgspec.Struct):
    """What every route says of a sample; `logprobs` each in its own way."""

    index: int
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None
    weight_versions: list[Span] | None = None
    """None where the route, or the release, does not say."""
    text: str | None = None
    logprobs: dict[str, Any] | None = None

    @property
    def reason(self) -> FinishReason:
        """Why it ended."""
        try:
            return FinishReason(self.finish_reason or "")
        except ValueError:
            raise BadAnswer(
                f"the engine finished for the reason {self.finish_reason!r}, which we do not know"
            ) from None

    def scored_prompt(self) -> list[float | None]:
        """Of each token of the prompt its own logprob; the first has none."""
        ids, entries = self.prompt_token_ids or [], self.prompt_logprobs
        if entries is None or len(entries) != len(ids):
            raise InvalidCompletion(
                f"{len(ids)} prompt tokens carry {None if entries is None else len(entries)} prompt logprobs"
            )
        own = [(entry or {}).get(str(token)) for token, entry in zip(ids[1:], entries[1:], strict=True)]
        for token, found in zip(ids[1:], own, strict=True):
            if found is None:
                raise InvalidCompletion(f"the prompt logprobs have no entry for their own token {token}")
        return [None, *scores(found.logprob for found in own if found is not None)]

    def scored_ids(self) -> list[int]:
        """Ids of the prompt but its first, by the names of the only score that each has."""
        entries = (self.prompt_logprobs or [])[1:]
        if any(entry is None or len(entry) != 1 for entry in entries):
            raise InvalidCompletion(
                "a token of the prompt has no score, or several: nobody can say which is its own"
            )
        return [int(name) for entry in entries for name in entry or () if name.isdecimal()]

    def take_names(self, usage: Usage, sent: Sequence[int]) -> None:
        """Fill in what a release without return_token_ids does not say: ids by the names that its logprobs have, and
        the prompt that was sent, where as many tokens were counted.
        """
        names = (self.logprobs or {}).get("tokens")
        if isinstance(names, list):
            self.token_ids = [token_id(str(name)) for name in names]
        if usage.prompt_tokens == len(sent):
            self.prompt_token_ids = list(sent)


class Response(msgspec.Struct):
    """One answer; choices stay raw, so that one bad choice does not spoil its neighbours."""

    choices: list[dict[str, Any]]
    usage: Usage | None = None
    prompt_token_ids: Any = None
    prompt_logprobs: Any = None


class RouteTold(NamedTuple):
    """What a route says of the tokens of one sample."""

    owners: list[int] | None
    logprobs: list[float | None]
    alternatives: list[dict[str, float | None] | None]
    """By names of tokens, which need not be ids where no alternatives were asked for."""


class Route(NamedTuple):
    """How to ask, and how logprobs come back."""

    path: str
    body: Callable[[tuple[int, ...], str, Mapping[str, Any]], dict[str, Any]]
    """Of a prompt, a model's name and sampling parameters."""
    streaming: Streaming
    """Differences, of as many tokens as --stream-interval says; ids of the prompt come with the first."""
    told: Callable[[dict[str, Any]], RouteTold]
    prompt_apart: bool = False
    """What is said of the prompt is said once, beside the samples."""
    closed: frozenset[int] = frozenset()
    """Statuses that mean that the route is switched off."""
    more_alternatives: int = 0
    """To ask for beyond those that are wanted."""
    must_read: tuple[str, ...] = ()
    """Flags without which alternatives have no ids."""

    def request_body(self, request: Request, model: str, *, explicit: bool) -> dict[str, Any]:
        """The JSON of one call; `explicit` as in `stated`."""
        sampling = stated(request.sampling, explicit=explicit)
        if request.sampling.logprobs:
            sampling["logprobs"] += self.more_alternatives
        body = self.body(request.prompt.token_ids, model, sampling)
        if request.prompt.cache_salt is not None:
            body["cache_salt"] = request.prompt.cache_salt
        return body

    def probe_body(self, model: str, extra: Mapping[str, object]) -> dict[str, Any]:
        """The smallest call, with what is to be found out where it belongs."""
        inner = {name: value for name, value in extra.items() if name in SamplingParams.__struct_fields__}
        body = self.body((0, 0), model, {"max_tokens": 1, "temperature": 0, **inner})
        return body | {name: value for name, value in extra.items() if name not in inner}

    def check_open(self, address: str, reply: Reply) -> None:
        """The server lets us ask by this route."""
        if reply.status in self.closed:
            raise EngineRefused(
                f"{address}{self.path} is not open (it answered {reply.status}): start the server with {FLAG}, "
                "or leave engine.route at completions"
            )

    def choices(self, answer: object, sent: tuple[int, ...]) -> list[dict[str, Any]]:
        """The samples, each with what was said of all.

        0.28 does not repeat the prompt; where it counted as many tokens as were sent, those are taken.
        """
        response = parse(answer, Response, self.path)
        about: dict[str, Any] = {}
        if self.prompt_apart:
            ids, usage = response.prompt_token_ids, response.usage
            if ids is None and usage is not None and usage.prompt_tokens == len(sent):
                ids = list(sent)
            about = {"prompt_token_ids": ids, "prompt_logprobs": response.prompt_logprobs}
        return [choice | about for choice in response.choices]


def is_nan(reply: Reply) -> bool:
    """The server computed NaN, and could not write it."""
    return reply.status == 400 and NAN_REFUSAL.encode() in reply.body


def likeliest(told: RouteTold, token_ids: Sequence[int], count: int) -> list[Pairs]:
    """The `count` likeliest tokens at each position, ties by id; fewer where truncation left fewer."""
    if count and len(told.alternatives) != len(token_ids):
        raise InvalidCompletion(f"{len(token_ids)} tokens carry alternatives for {len(told.alternatives)}")
    pairs = zip(token_ids, told.alternatives, strict=True) if count else ()
    return [_ranked(sampled, entry, count) for sampled, entry in pairs]


def _ranked(sampled: int, entry: dict[str, float | None] | None, count: int) -> Pairs:
    if not entry:
        raise InvalidCompletion(f"token {sampled} carries no alternatives, although {count} were asked for")
    found = {token_id(name): number(value) for name, value in entry.items()}
    # The sampled token comes on top of the `count` where it is not one of them.
    if len(found) > count + (sampled in found):
        raise InvalidCompletion(f"token {sampled} carries {len(found)} alternatives; {count} were asked for")
    # Written so that NaN, which compares false with everything, is kept and found out.
    kept = [(token, logprob) for token, logprob in found.items() if not logprob <= NOTHING]
    return sorted(kept, key=lambda pair: (-pair[1], pair[0]))[:count]


def token_id(name: str) -> int:
    """Of `token_id:5` the 5."""
    digits = name.removeprefix(PREFIX)
    if digits == name or not digits.isdecimal():
        raise BadAnswer(f"the engine names a token {name!r}; it must honour return_tokens_as_token_ids")
    return int(digits)


class _Completed(msgspec.Struct):
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None]


def _completed(logprobs: dict[str, Any]) -> RouteTold:
    """Tokens may be named by text, and are then not compared."""
    told = parse(logprobs, _Completed, COMPLETIONS.path)
    by_id = all(name.startswith(PREFIX) for name in told.tokens)
    return RouteTold(
        [token_id(name) for name in told.tokens] if by_id else None, told.token_logprobs, told.top_logprobs
    )


class _Alternative(msgspec.Struct):
    logprob: float | None
    token_id: int | None = None
    token: str | None = None
    """`token_id:5`: how 0.28 writes ids."""

    @property
    def id(self) -> int:
        return token_id(self.token or "") if self.token_id is None else self.token_id


class _Entry(_Alternative):
    top_logprobs: list[_Alternative] = []


class _Content(msgspec.Struct):
    content: list[_Entry]


def _generated(logprobs: dict[str, Any]) -> RouteTold:
    entries = parse(logprobs, _Content, GENERATE.path).content
    return RouteTold(
        [entry.id for entry in entries],
        [entry.logprob for entry in entries],
        [{f"{PREFIX}{each.id}": each.logprob for each in entry.top_logprobs} for entry in entries],
    )


def _completions_body(token_ids: tuple[int, ...], model: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"model": model, "prompt": token_ids, **ids, **sampling}


def _generate_body(token_ids: tuple[int, ...], model: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, "token_ids": token_ids, "return_token_ids": True, "sampling_params": sampling}


COMPLETIONS = Route(
    path="/v1/completions",
    body=_completions_body,
    streaming=Streaming(
        ask=_STREAMED,
        samples="choices",
        index="index",
        lists=("token_ids", "logprobs/tokens", "logprobs/token_logprobs", "logprobs/top_logprobs"),
        text="text",
        finish="finish_reason",
    ),
    told=_completed,
    must_read=("return_tokens_as_token_ids",),
)
GENERATE = Route(
    path="/inference/v1/generate",
    body=_generate_body,
    # Versions come with the last delta, and logprobs of the prompt with none.
    streaming=Streaming(
        ask=_STREAMED,
        samples="choices",
        index="index",
        lists=("token_ids", "logprobs/content"),
        finish="finish_reason",
    ),
    told=_generated,
    prompt_apart=True,
    closed=frozenset({403, 404}),
    # The list is cut behind as many entries as were asked for, and the sampled token is the first of them: where it is
    # not among the likeliest, the last of those is lost.
    more_alternatives=1,
)

ROUTES: Mapping[str, Route] = {"completions": COMPLETIONS, "generate": GENERATE}
"""By their names in `engine.route`."""

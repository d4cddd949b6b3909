"""vLLM's route for ids in and ids out: what does a call look like, and what does its answer say more?

`/inference/v1/generate` takes vLLM's own sampling parameters, so that generation_config.json has nothing to fill in
but max_tokens, which we always send. Its answers carry ids as numbers, and the versions of the weights that made each
token, by the server's own account. It scores and streams as well, so nothing is asked of another route.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from zerodrift.backends import vllm_wire
from zerodrift.backends.pieces import Streaming
from zerodrift.core.completion import Answer, Completion, TokenAlternative
from zerodrift.core.errors import InvalidCompletion, NonFinite
from zerodrift.core.request import Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion

PATH = "/inference/v1/generate"

FLAG = "--enable-scale-out"
"""Without it releases from 0.30 on answer 403; those before have the route, and do not know the flag."""

CLOSED = frozenset({403, 404})

ONE_ALTERNATIVE = 2
"""The list is cut behind as many entries as were asked for, and the sampled token is the first of them: where it is not
among the likeliest, the last of those is lost. One more is asked for, and the best are kept."""

MUST_READ = ()

STREAMING = Streaming(
    ask={"stream": True, "stream_options": {"include_usage": True}},
    samples="choices",
    index="index",
    lists={name: name for name in ("token_ids", "logprobs/content")},
    finish="finish_reason",
)
"""Differences; ids of the prompt come with the first, versions with the last, and logprobs of the prompt with none."""


class _Alternative(msgspec.Struct):
    logprob: float | None
    token_id: int | None = None
    token: str | None = None
    """`token_id:5`: how 0.28 writes ids."""

    @property
    def id(self) -> int:
        return vllm_wire.token_id(self.token or "") if self.token_id is None else self.token_id


class _Entry(_Alternative):
    top_logprobs: list[_Alternative] = []


class _Logprobs(msgspec.Struct):
    content: list[_Entry]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(vllm_wire.Indexed):
    finish_reason: str | None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: vllm_wire.PromptEntries | None = None


class _Usage(vllm_wire.Usage):
    prompt_tokens: int | None = None


class _Response(msgspec.Struct):
    choices: list[dict[str, Any]]
    usage: _Usage | None = None
    prompt_token_ids: Any = None
    prompt_logprobs: Any = None


def request_body(request: Request, model: str, *, explicit: bool) -> dict[str, object]:
    """The JSON of one call; what is left out without `explicit` has vLLM's own default, whatever the model says."""
    sampling = vllm_wire.sampling_fields(request.sampling, explicit=explicit)
    if request.sampling.logprobs:
        sampling["logprobs"] = request.sampling.logprobs + ONE_ALTERNATIVE - 1
    body = _body(request.prompt.token_ids, model, sampling)
    if request.prompt.cache_salt is not None:
        body["cache_salt"] = request.prompt.cache_salt
    return body


def score_body(token_ids: tuple[int, ...], model: str) -> dict[str, object]:
    """A call that scores its own prompt, and throws one greedy token away."""
    return _body(token_ids, model, {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0})


def probe_body(model: str, extra: Mapping[str, object]) -> dict[str, object]:
    """The smallest call, with what is to be found out where it belongs."""
    inner = {name: value for name, value in extra.items() if name in SamplingParams.__struct_fields__}
    body = _body((0, 0), model, {"max_tokens": 1, "temperature": 0, **inner})
    return body | {name: value for name, value in extra.items() if name not in inner}


def read_answer(answer: object | None, request: Request, context: vllm_wire.Context) -> Answer:
    """Every sample of one request, in order of its index; `answer` None stands for NAN_REFUSAL."""
    whole = None if answer is None else _spread(answer, request.prompt.token_ids)
    return vllm_wire.read_samples(whole, request, context, PATH, _completion)


def read_scores(answer: object, token_ids: tuple[int, ...]) -> list[float]:
    """Raw logprobs of tokens 1… of the sequence that was sent."""
    return vllm_wire.read_scores(_spread(answer, token_ids), token_ids)


def _body(token_ids: tuple[int, ...], model: str, sampling: dict[str, Any]) -> dict[str, object]:
    return {"model": model, "token_ids": token_ids, "return_token_ids": True, "sampling_params": sampling}


def _spread(answer: object, sent: tuple[int, ...]) -> dict[str, object]:
    """What is said of the prompt once, said with every sample, as /v1/completions does.

    0.28 does not repeat the prompt; where it counted as many tokens as were sent, those are taken.
    """
    response = vllm_wire.parse(answer, _Response, PATH)
    ids, usage = response.prompt_token_ids, response.usage
    if ids is None and usage is not None and usage.prompt_tokens == len(sent):
        ids = list(sent)
    about = {"prompt_token_ids": ids, "prompt_logprobs": response.prompt_logprobs}
    return {"choices": [choice | about for choice in response.choices], "usage": msgspec.to_builtins(usage)}


def _completion(raw: Mapping[str, Any], request: Request, context: vllm_wire.Context) -> Completion:
    choice = vllm_wire.parse(raw, _Choice, PATH)
    if choice.token_ids is None or choice.prompt_token_ids is None:
        raise InvalidCompletion(f"{PATH} returned no token ids, or counted others than the prompt's")
    if choice.logprobs is None:
        raise InvalidCompletion("the sample carries no logprobs; ask for them with logprobs=0 or more")
    sampling, entries = request.sampling, choice.logprobs.content
    owners = [entry.id for entry in entries]
    if owners != choice.token_ids:
        raise InvalidCompletion(
            f"the engine sampled {str(choice.token_ids)[:60]} and reports logprobs of {str(owners)[:60]}; "
            "they belong to other tokens"
        )
    scored = sampling.prompt_logprobs is not None
    return Completion(
        prompt_token_ids=tuple(choice.prompt_token_ids),
        token_ids=tuple(choice.token_ids),
        logprobs=tuple(_own(entry) for entry in entries),
        kind=context.kind,
        sampling=sampling,
        finish_reason=vllm_wire.finish_reason(choice.finish_reason),
        versions=_versions(choice.weight_versions, len(choice.token_ids), context.version),
        fingerprint=context.fingerprint,
        sample_index=choice.index,
        top_logprobs=tuple(_ranked(entry, sampling.logprobs) for entry in entries)
        if sampling.logprobs
        else (),
        prompt_logprobs=vllm_wire.prompt_logprobs(choice.prompt_token_ids, choice.prompt_logprobs)
        if scored
        else (),
        cached_tokens=context.cached_tokens,
    )


def _own(entry: _Entry) -> float:
    """This route writes -9999 for NaN too, and no token that was sampled has so small a probability."""
    value = vllm_wire.number(entry.logprob)
    if value <= vllm_wire.NEVER:
        raise NonFinite(
            f"token {entry.id} was sampled with logprob {value:g}, which is how {PATH} writes NaN; "
            "look for NaN in the weights"
        )
    return value


def _ranked(entry: _Entry, count: int) -> tuple[TokenAlternative, ...]:
    found = {each.id: vllm_wire.number(each.logprob) for each in entry.top_logprobs}
    if not found:
        raise InvalidCompletion(f"token {entry.id} carries no alternatives, although {count} were asked for")
    if len(found) > count + ONE_ALTERNATIVE - 1:
        raise InvalidCompletion(f"token {entry.id} carries {len(found)} alternatives; {count} were asked for")
    return vllm_wire.likeliest(found)[:count]


def _versions(spans: list[_Span] | None, count: int, asked: WeightVersion) -> tuple[VersionSpan, ...]:
    """As the server says; `asked`, which is what it calls its weights now, where it says nothing (0.28).

    Two updates between two tokens leave a span without a token in between.
    """
    if spans is None:
        return vllm_wire.one_version(asked, count)
    return tuple(
        VersionSpan(WeightVersion(span.version) if span.version else vllm_wire.UNKNOWN, span.start, span.end)
        for span in spans
        if span.start != span.end
    )

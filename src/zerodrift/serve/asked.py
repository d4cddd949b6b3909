"""From a body to what the engine is asked: prompts and one set of sampling parameters. Torch-free."""

from typing import Any, NamedTuple

import msgspec

from zerodrift.core.request import SamplingParams
from zerodrift.serve import wire
from zerodrift.serve.errors import CallRefused
from zerodrift.serve.limits import ServeLimits

_SAME = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *(
        "max_tokens",
        "min_tokens",
        "stop_token_ids",
        "ignore_eos",
        "logit_bias",
        "seed",
        "n",
        "prompt_logprobs",
    ),
)
"""Fields that mean what they mean in `SamplingParams`."""


class AskedModel(NamedTuple):
    """Who is to answer."""

    name: str
    """As the client calls it."""
    lora: str | None
    """An adapter; None is the base."""


class AskedSamples(msgspec.Struct, frozen=True, kw_only=True):
    """One call that generates."""

    model: AskedModel
    prompts: tuple[str | tuple[int, ...], ...]
    sampling: SamplingParams
    """For each prompt; `max_tokens` is right where `fills` is false."""
    fills: bool
    """No max_tokens was given: as many as the context leaves."""
    wants_logprobs: bool
    streams: bool = False
    usage_in_stream: bool = False
    names_ids: bool = False
    """Tokens are called `token_id:5`."""
    returns_ids: bool = False
    cache_salt: str | None = None
    request_id: str | None = None
    with_text: bool = True

    @property
    def samples(self) -> int:
        """In all."""
        return len(self.prompts) * self.sampling.n


def of_completion(body: wire.CompletionBody, model: AskedModel, limits: ServeLimits) -> AskedSamples:
    """/v1/completions."""
    return _asked(
        body,
        model=model,
        prompts=_prompts(body.prompt, limits),
        sampling=_sampling(body, body.logprobs, limits),
        fills=False,
        wants_logprobs=body.logprobs is not None,
        limits=limits,
    )


def of_chat(body: wire.Chat, prompt: list[int], model: AskedModel, limits: ServeLimits) -> AskedSamples:
    """/v1/chat/completions, of a conversation that was rendered."""
    if body.top_logprobs and not body.logprobs:
        raise CallRefused(
            400, "top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs"
        )
    given = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(given) > 1:
        raise CallRefused(
            400, "max_tokens and max_completion_tokens differ; send one", param="max_completion_tokens"
        )
    body = msgspec.structs.replace(body, max_tokens=given.pop() if given else None)
    fills = body.max_tokens is None
    return _asked(
        body,
        model=model,
        prompts=(tuple(prompt),),
        sampling=_sampling(body, body.top_logprobs if body.logprobs else None, limits, fills=fills),
        fills=fills,
        wants_logprobs=bool(body.logprobs),
        limits=limits,
    )


def of_generate(body: wire.GenerateBody, model: AskedModel, limits: ServeLimits) -> AskedSamples:
    """/inference/v1/generate."""
    inner = body.sampling_params
    asked = _asked(
        body,
        model=model,
        prompts=(tuple(body.token_ids),),
        sampling=_sampling(inner, inner.logprobs, limits, fills=inner.max_tokens is None),
        fills=inner.max_tokens is None,
        wants_logprobs=inner.logprobs is not None,
        limits=limits,
    )
    return msgspec.structs.replace(asked, names_ids=True, with_text=body.output_mode == "text")


def of_score(body: wire.Score, model: AskedModel, limits: ServeLimits) -> AskedSamples:
    """/v1/token_logprobs: prompts, of which nothing is wanted but their logprobs."""
    _at_most("token_ids", len(body.token_ids), limits.prompts, "sequences")
    _at_most("top_logprobs", body.top_logprobs or 0, limits.logprobs, "alternatives per token")
    return AskedSamples(
        model=model,
        prompts=tuple(map(tuple, body.token_ids)),
        sampling=SamplingParams(max_tokens=1, prompt_logprobs=body.top_logprobs or 0, seed=0),
        fills=False,
        wants_logprobs=False,
        cache_salt=body.cache_salt,
    )


def _asked(body: Any, *, limits: ServeLimits, **parts: Any) -> AskedSamples:
    options = body.stream_options
    streams = bool(body.stream)
    if options is not None and not streams:
        raise CallRefused(400, "stream_options is given without stream", param="stream_options")
    if options is not None and options.continuous_usage_stats:
        raise CallRefused(400, "usage comes once, at the end of a stream", param="continuous_usage_stats")
    asked = AskedSamples(
        streams=streams,
        usage_in_stream=options is not None and bool(options.include_usage),
        names_ids=bool(getattr(body, "return_tokens_as_token_ids", False)),
        returns_ids=bool(body.return_token_ids),
        cache_salt=body.cache_salt,
        request_id=body.request_id,
        **parts,
    )
    if streams and asked.sampling.prompt_logprobs is not None:
        raise CallRefused(
            400, "prompt_logprobs are not streamed; ask for them without stream", param="prompt_logprobs"
        )
    _at_most("n", asked.samples, limits.samples, "samples in one request")
    return asked


def _sampling(
    body: wire.SamplingBody, logprobs: int | None, limits: ServeLimits, *, fills: bool = False
) -> SamplingParams:
    """Defaults are the model's own distribution, whatever generation_config.json says."""
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
        _at_most("stop", len(given["stop"]), limits.stops, "stop strings")
    _at_most("stop_token_ids", len(body.stop_token_ids or ()), limits.biases, "stop tokens")
    _at_most("logit_bias", len(body.logit_bias or ()), limits.biases, "tokens")
    _at_most("logprobs", logprobs or 0, limits.logprobs, "alternatives per token")
    _at_most("prompt_logprobs", body.prompt_logprobs or 0, limits.logprobs, "alternatives per token")
    if fills:
        # Until the prompt's length is known; no less than min_tokens, so that the two do not contradict each other.
        given["max_tokens"] = max(body.min_tokens or 0, SamplingParams().max_tokens)
    return SamplingParams(**given, logprobs=logprobs or 0)


def _prompts(prompt: str | list[Any], limits: ServeLimits) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if prompt and all(type(each) is int for each in prompt):
        return (tuple(prompt),)
    _at_most("prompt", len(prompt), limits.prompts, "prompts")
    whole = all(type(each) is str for each in prompt) or all(
        type(each) is list and each and all(type(token) is int for token in each) for each in prompt
    )
    if not prompt or not whole:
        raise CallRefused(
            400, "prompt is none of: a text, token ids, a list of texts, a list of token ids", param="prompt"
        )
    return tuple(each if isinstance(each, str) else tuple(each) for each in prompt)


def _at_most(name: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise CallRefused(
            400, f"{name} asks for {count} {what}; this server allows {most}", code="limit", param=name
        )

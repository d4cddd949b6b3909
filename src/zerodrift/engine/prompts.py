"""What a user may hand in for prompts and parameters, made into pairs of `Prompt` and `SamplingParams`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerodrift import models
from zerodrift.core import require
from zerodrift.core.errors import InvalidPrompt, InvalidSampling, InvalidValue
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.core.version import AdapterVersion
from zerodrift.engine.text import MAX_STOP_CHARACTERS
from zerodrift.models.family.rope import longest_context

PromptLike = str | list[int] | tuple[int, ...] | Prompt | Mapping[str, Any]
"""A text, ids (a tensor of them too), a `Prompt`, or what vLLM takes: {"prompt": text} or {"prompt_token_ids": ids}, with "cache_salt"."""
_KEYS = ("prompt", "prompt_token_ids")


class ServedFacts(NamedTuple):
    """What a request is judged by."""

    max_model_len: int
    """Prompt and output together."""
    vocab_size: int
    has_tokenizer: bool


class CheckedRequest(NamedTuple):
    """A request that the model can serve."""

    prompt: Prompt
    sampling: SamplingParams
    """With the seed that is used."""
    forced: tuple[int, ...] = ()
    stream_text: bool = False
    lora: AdapterVersion | None = None


def tokenizer_of(model: Any, tokenizer: Any) -> Any:
    """The one that is given, by itself or by name; else the model's, where the model has a name."""
    named = model if tokenizer is None else tokenizer
    return models.tokenizer(named) if isinstance(named, (str, Path)) else tokenizer


class AskedRequest(NamedTuple):
    """A request as it was asked for."""

    prompt: PromptLike
    sampling: SamplingParams
    forced: tuple[int, ...]
    lora: str | None


def as_requests(
    prompts: PromptLike | Sequence[PromptLike],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    forced: Sequence[Sequence[int]] | None,
    lora: str | Sequence[str | None] | None,
    tokenizer: Any,
) -> list[AskedRequest]:
    """Prompts, each with its parameters, its forced tokens and its adapter."""
    requests = as_prompts(prompts, tokenizer)
    given = [()] * len(requests) if forced is None else [tuple(tokens) for tokens in forced]
    if len(given) != len(requests):
        raise InvalidPrompt(
            f"{len(requests)} prompts came with {len(given)} lists of forced tokens; give one each"
        )
    adapters = _as_adapters(lora, len(requests))
    parameters = as_sampling(sampling, len(requests))
    return [AskedRequest(*each) for each in zip(requests, parameters, given, adapters, strict=True)]


def _as_adapters(lora: str | Sequence[str | None] | None, num_prompts: int) -> list[str | None]:
    """One for all, or one for each."""
    if lora is None or isinstance(lora, str):
        return [lora] * num_prompts
    if not isinstance(lora, (list, tuple)) or not all(isinstance(each, str | None) for each in lora):
        raise InvalidValue(
            f"lora is {lora!r:.80}; give the name of an adapter that is loaded, one for all or a list with None for none"
        )
    if len(lora) != num_prompts:
        raise InvalidValue(
            f"{num_prompts} prompts came with {len(lora)} adapters; give one for all or one for each"
        )
    return list(lora)


def as_prompts(prompts: PromptLike | Sequence[PromptLike], tokenizer: Any) -> list[PromptLike]:
    """One prompt or many: a text, a list of ids, a `Prompt`, or a list of those. What is none of these raises.

    Ids are not looked at: a prompt with wrong ones is refused by itself, beside neighbours that are served.
    """
    prompts = _listed(prompts)
    if isinstance(prompts, (str, Prompt, Mapping)):
        found: list[PromptLike] = [prompts]
    elif not isinstance(prompts, (list, tuple)):
        raise InvalidPrompt(f"prompts are a {type(prompts).__name__}; give a list of them (list(…))")
    elif prompts and all(isinstance(each, int) for each in prompts):
        found = [list(prompts)]
    else:
        found = [_listed(each) for each in prompts]
    for each in found:
        _check_kind(each, tokenizer)
    return found


def as_prompt(prompt: PromptLike, tokenizer: Any) -> Prompt:
    """Text is tokenized as the tokenizer does by default, special tokens included."""
    prompt = _listed(prompt)
    _check_kind(prompt, tokenizer)
    if isinstance(prompt, Prompt):
        return prompt
    salt = None
    if isinstance(prompt, Mapping):
        salt = prompt.get("cache_salt")
        prompt = _listed(next(prompt[key] for key in _KEYS if key in prompt))
    if isinstance(prompt, str):
        try:
            ids = tuple(tokenizer(prompt)["input_ids"])
        except Exception as error:  # whatever a vendor raises, such as for half a surrogate pair
            raise InvalidPrompt(f"the tokenizer cannot read {prompt[:40]!r}: {error}") from error
        return Prompt(ids, prompt, salt)
    return Prompt(tuple(prompt), cache_salt=salt)  # type: ignore[arg-type]


def _listed(prompt: Any) -> Any:
    """Ids out of a tensor or an array; all else as it is."""
    if not hasattr(prompt, "tolist"):
        return prompt
    if getattr(prompt, "ndim", 0) != 1:
        raise InvalidPrompt(
            f"a prompt is a {type(prompt).__name__} of {getattr(prompt, 'ndim', 0)} dimensions; rows of a batch may be padded: "
            "give a list of prompts, each without its padding"
        )
    return prompt.tolist()


def _check_kind(prompt: PromptLike, tokenizer: Any) -> None:
    if isinstance(prompt, Mapping):
        if len([key for key in _KEYS if key in prompt]) != 1 or prompt.keys() - {*_KEYS, "cache_salt"}:
            raise InvalidPrompt(
                f"a prompt is a mapping with {sorted(map(str, prompt))}; give prompt or prompt_token_ids and at most a "
                "cache_salt, or of a tokenizer's answer its input_ids alone"
            )
        prompt = _listed(next(prompt[key] for key in _KEYS if key in prompt))
    if not isinstance(prompt, (str, list, tuple, Prompt)):
        raise InvalidPrompt(
            f"a prompt is a {type(prompt).__name__}; give a text, a list of token ids, or a zerodrift.Prompt"
        )
    if isinstance(prompt, str) and tokenizer is None:
        raise InvalidPrompt("the prompt is text, but the engine was made without a tokenizer; give token ids")


def as_sampling(
    sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One for all, or one for each."""
    if sampling is None:
        return [SamplingParams()] * num_prompts
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if not isinstance(sampling, (list, tuple)) or not all(
        isinstance(each, SamplingParams) for each in sampling
    ):
        raise InvalidSampling(
            f"sampling parameters are {sampling!r:.80}; give zerodrift.SamplingParams, one for all or a list"
        )
    if len(sampling) != num_prompts:
        raise InvalidSampling(
            f"{num_prompts} prompts came with {len(sampling)} sampling parameters; give one for all or one for each"
        )
    return list(sampling)


def check_context(max_model_len: Any, config: Any) -> None:
    """Positions that the model was never trained for give numbers, and no sense: as vLLM, we refuse them."""
    require.whole(
        InvalidValue, "max_model_len", max_model_len, "it counts tokens per request, two or more", 2
    )
    longest = longest_context(config)
    # The last token of a request is drawn and never forwarded.
    if max_model_len > longest + 1:
        raise InvalidValue(
            f"max_model_len is {max_model_len}, but the model was made for {longest} positions; leave it out, or give no "
            "more than that"
        )


def check_request(
    prompt: Prompt, sampling: SamplingParams, forced: Sequence[int], facts: ServedFacts
) -> None:
    """What the model could never serve is refused before it is queued, and never cut to size."""
    prompt.check_vocabulary(facts.vocab_size)
    sampling.check_vocabulary(facts.vocab_size)
    length, context = len(prompt.token_ids), facts.max_model_len
    if length >= context:
        raise InvalidPrompt(
            f"the prompt has {length} tokens, and the context of {context} leaves no room for an answer; shorten it"
        )
    if length + sampling.max_tokens > context:
        raise InvalidSampling(
            f"max_tokens is {sampling.max_tokens}, but after {length} prompt tokens the context of {context} has room "
            f"for {context - length}; ask for no more than that"
        )
    require.token_ids(InvalidPrompt, "forced", tuple(forced))
    if wrong := [token for token in forced if token >= facts.vocab_size]:
        raise InvalidPrompt(f"token {wrong[0]} is forced, but the model has {facts.vocab_size} tokens")
    if len(forced) > sampling.max_tokens:
        raise InvalidSampling(f"{len(forced)} tokens are forced, but max_tokens is {sampling.max_tokens}")
    _check_stops(sampling, facts)


def _check_stops(sampling: SamplingParams, facts: ServedFacts) -> None:
    for stop in sampling.stop:
        if len(stop) > MAX_STOP_CHARACTERS:
            raise InvalidSampling(
                f"a stop string has {len(stop)} characters and begins {stop[:20]!r}; at most {MAX_STOP_CHARACTERS} are "
                "allowed, since a stream holds back as much text"
            )
    if sampling.stop and not facts.has_tokenizer:
        raise InvalidSampling(
            f"stop is {sampling.stop!r}, but the engine was made without a tokenizer and sees no text; give it one, or "
            "use stop_token_ids"
        )

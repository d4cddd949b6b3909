"""What a user may hand in for prompts and parameters, made into pairs of `Prompt` and `SamplingParams`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from zerodrift.core.errors import InvalidPrompt, InvalidSampling
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.engine.text import MAX_STOP_CHARACTERS

PromptLike = str | list[int] | tuple[int, ...] | Prompt


class ServedFacts(NamedTuple):
    """What a request is judged by."""

    max_model_len: int
    """Prompt and output together."""
    vocab_size: int
    has_tokenizer: bool


def as_prompts(prompts: PromptLike | Sequence[PromptLike], tokenizer: Any) -> list[Prompt]:
    """One prompt or many: a text, a list of ids, a `Prompt`, or a list of those."""
    if isinstance(prompts, (str, Prompt)):
        return [as_prompt(prompts, tokenizer)]
    ids = [each for each in prompts if isinstance(each, int)]
    if ids and len(ids) == len(prompts):
        return [as_prompt(ids, tokenizer)]
    return [as_prompt(each, tokenizer) for each in prompts]  # type: ignore[arg-type]


def as_prompt(prompt: PromptLike, tokenizer: Any) -> Prompt:
    """Text is tokenized as the tokenizer does by default, special tokens included."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidPrompt(
                "the prompt is text, but the engine was made without a tokenizer; give token ids"
            )
        return Prompt(tuple(tokenizer(prompt)["input_ids"]), prompt)
    if isinstance(prompt, (list, tuple)):
        return Prompt(tuple(prompt))
    raise InvalidPrompt(
        f"a prompt is a {type(prompt).__name__}; give a text, a list of token ids, or a zerodrift.Prompt"
    )


def as_sampling(
    sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One for all, or one for each."""
    if sampling is None:
        return [SamplingParams()] * num_prompts
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if len(sampling) != num_prompts:
        raise InvalidSampling(
            f"{num_prompts} prompts came with {len(sampling)} sampling parameters; give one for all or one for each"
        )
    return list(sampling)


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
    if wrong := [token for token in forced if not 0 <= token < facts.vocab_size]:
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

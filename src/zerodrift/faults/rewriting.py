"""How an answer is rewritten so that it still looks like one: spans fit, parameters are those requested.

Prompt logprobs of a prompt that is being denied would give it away, and are left out with it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from zerodrift.core.completion import Answer, Completion, TokenAlternative
from zerodrift.core.request import Request
from zerodrift.core.version import LineageSegment, VersionSpan

Span = TypeVar("Span", VersionSpan, LineageSegment)
Change = Callable[[Request, Completion], Completion]


def rewrite(requests: Sequence[Request], answers: Sequence[Answer], change: Change) -> list[Answer]:
    """Every completion changed, in order; problems stay."""
    return [
        msgspec.structs.replace(
            answer, completions=tuple(change(request, each) for each in answer.completions)
        )
        for request, answer in zip(requests, answers, strict=True)
    ]


def as_requested(request: Request, completion: Completion) -> Completion:
    """Claims the parameters of the request; the seed is the one that was used."""
    sampling = msgspec.structs.replace(request.sampling, seed=completion.sampling.seed)
    return msgspec.structs.replace(completion, sampling=sampling)


def with_prompt(completion: Completion, prompt: tuple[int, ...]) -> Completion:
    """Claims to continue `prompt`."""
    if completion.prompt_token_ids == prompt:
        return completion
    return msgspec.structs.replace(
        completion,
        prompt_token_ids=prompt,
        prompt_logprobs=(),
        lineage=_fitted(completion.lineage, len(prompt) + len(completion.token_ids) - 1),
    )


def with_output(completion: Completion, token_ids: tuple[int, ...], **reported: Any) -> Completion:
    """Claims `token_ids` as its output, with what is reported of them."""
    return msgspec.structs.replace(
        completion,
        token_ids=token_ids,
        versions=_fitted(completion.versions, len(token_ids)),
        lineage=_fitted(completion.lineage, len(completion.prompt_token_ids) + len(token_ids) - 1),
        **reported,
    )


def restated(completion: Completion, logprobs: Iterable[float], ratio: float) -> Completion:
    """The same tokens with the logprobs of another temperature: `ratio` = old temperature / new.

    Alternatives follow without new logits, since log p(a) - log p(b) = (logit a - logit b) / temperature.
    """
    values = tuple(logprobs)
    alternatives = tuple(
        tuple(TokenAlternative(each.token_id, new + ratio * (each.logprob - old)) for each in entries)
        for entries, old, new in zip(completion.top_logprobs, completion.logprobs, values, strict=False)
    )
    return msgspec.structs.replace(completion, logprobs=values, top_logprobs=alternatives)


def _fitted(spans: tuple[Span, ...], length: int) -> tuple[Span, ...]:
    """The same spans over `length` positions: the last is cut or stretched."""
    kept = [span for span in spans if span.start < length]
    if kept:
        kept[-1] = msgspec.structs.replace(kept[-1], end=length)
    return tuple(kept)

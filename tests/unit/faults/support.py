"""Requests to ask an engine with and without a fault, and what is compared of the answers."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.faults.registry import resolve

NEW = WeightVersion("new")


class Elsewhere:
    """An engine of which nothing is known but the protocol, as one behind HTTP."""

    name = "elsewhere"

    def __init__(self, hidden: ReferenceBackend, *without: Capability) -> None:
        self._hidden = hidden
        self.capabilities = hidden.capabilities - set(without)
        self.max_model_len = hidden.max_model_len
        for method in ("fingerprint", "generate", "score", "tokenize", "render_chat"):
            setattr(self, method, getattr(hidden, method))
        for method in ("load_weights", "reset_cache", "close"):
            setattr(self, method, getattr(hidden, method))


def ask(*lengths: int, **sampling: Any) -> list[Request]:
    """Requests with prompts of the given lengths, BOS first, and whatever sampling parameters."""
    values = {"temperature": 0.8, "max_tokens": 6, **sampling}
    return [
        Request(
            Prompt((0, *((37 * place + 101 * row) % 500 + 4 for place in range(length - 1)))),
            SamplingParams(**{"seed": 11 + row, **values}),
        )
        for row, length in enumerate(lengths)
    ]


def continuing(request: Request, *prompts: Prompt) -> list[Request]:
    """The same parameters for other prompts."""
    return [msgspec.structs.replace(request, prompt=prompt) for prompt in prompts]


def told(answers: Sequence[Answer]) -> list[Completion]:
    """Every completion, in order."""
    return [completion for answer in answers for completion in answer.completions]


def by(spec: str, engine: Backend, requests: Sequence[Request]) -> list[Completion]:
    """What the engine with that fault answers."""
    return told(resolve(spec).inject(engine).generate(requests))


def same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> bool:
    """Equal tokens, and logprobs equal up to rounding: an engine that batches otherwise gives other last bits."""
    return [each.token_ids for each in ours] == [each.token_ids for each in theirs] and all(
        a.logprobs == pytest.approx(b.logprobs, abs=1e-5) for a, b in zip(ours, theirs, strict=True)
    )


def outputs(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    """All that is sampled, without what is claimed of it."""
    return [
        (each.token_ids, each.logprobs, each.top_logprobs, each.finish_reason, each.text)
        for each in completions
    ]

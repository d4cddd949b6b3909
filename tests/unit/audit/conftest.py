"""An engine that says what a test tells it to, a chain whose logits are a table, and values to hold against them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from zerodrift import models
from zerodrift.backends.base import Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion, EngineFingerprint, FinishReason, LogprobKind
from zerodrift.core.request import Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import Gates

EVERYTHING = frozenset(Capability) - {Capability.TOKENIZE}
"""But text: a script has token ids only."""


def complete(
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (3, 4),
    logprobs: Sequence[float] | None = None,
    **fields: Any,
) -> Completion:
    """A completion of which only the named parts matter."""
    values: dict[str, Any] = {
        "kind": LogprobKind.PROCESSED,
        "sampling": SamplingParams(),
        "finish_reason": FinishReason.LENGTH,
        "versions": (VersionSpan(WeightVersion("a"), 0, len(output)),) if output else (),
        "fingerprint": "fake",
        **fields,
    }
    told = (-1.0,) * len(output) if logprobs is None else tuple(logprobs)
    return Completion(prompt_token_ids=tuple(prompt), token_ids=tuple(output), logprobs=told, **values)


@dataclass
class Scripted:
    """A backend whose answers are a function of the request and of how many came before it."""

    answer: Callable[[Request, int], Answer]
    scores: Callable[[Sequence[int]], list[float]] = lambda ids: [-1.0] * (len(ids) - 1)
    capabilities: frozenset[Capability] = EVERYTHING
    max_model_len: int = 1024
    name: str = "scripted"
    asked: list[Request] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    pieces: Callable[[Request, Answer], Answer] = lambda request, answer: msgspec.structs.replace(
        answer, stream_deltas=len(answer.completions[0].token_ids)
    )
    """What a stream makes of an answer."""

    def fingerprint(self) -> EngineFingerprint:
        return EngineFingerprint(engine=self.name, semantic={}, numeric={}, deployment={})

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        self.batches.append(len(requests))
        answers = []
        for request in requests:
            self.asked.append(request)
            answers.append(self.answer(request, len(self.asked) - 1))
        return answers

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        return [
            self.pieces(request, answer) if answer.completions else answer
            for request, answer in zip(requests, self.generate(requests), strict=True)
        ]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [self.scores(ids) for ids in sequences]

    def tokenize(self, text: str) -> tuple[int, ...]:
        raise NotImplementedError

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, generation_prompt: bool = True
    ) -> tuple[int, ...]:
        raise NotImplementedError

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        raise NotImplementedError

    def reset_cache(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Chain:
    """A language model whose logits depend on the last token alone: row `t` of a table predicts what follows `t`."""

    def __init__(self, table_VV: Any) -> None:
        self.table_VV = torch.as_tensor(np.asarray(table_VV, dtype=np.float64))
        self.calls = 0

    def __call__(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *_: Any
    ) -> list[torch.Tensor]:
        self.calls += 1
        return [
            self.table_VV[torch.tensor(list(ids[start - 1 : -1]))]
            for ids, start in zip(sequences, starts, strict=True)
        ]


@pytest.fixture(scope="session")
def completion():
    return complete


@pytest.fixture(scope="session")
def scripted():
    return Scripted


@pytest.fixture(scope="session")
def chain():
    return Chain


@pytest.fixture(scope="session")
def floor():
    """Rounding of one part in a million, whatever the token."""
    return Floor("float32", 8, 100, 1e-6, 2e-6, (-10.0, 0.0), (1e-6, 1e-6))


@pytest.fixture(scope="session")
def gates():
    return Gates(mean=1e-5, p90=2.5e-5, k3=1e-6, veto=2.0)


@pytest.fixture(scope="session")
def llama():
    """In fp64; shared, so no test loads weights into it."""
    return ReferenceBackend("testbed:llama")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The llama testbed as a directory."""
    return models.materialise("testbed:llama", tmp_path_factory.mktemp("checkpoint") / "model")

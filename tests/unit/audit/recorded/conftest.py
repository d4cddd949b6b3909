from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zerodrift.audit.measure import TokenTable
from zerodrift.core.request import SamplingParams
from zerodrift.records.recorded import RecordedRollout

Floats = NDArray[np.float64]


@pytest.fixture
def rollout() -> Callable[..., RecordedRollout]:
    """A rollout of three tokens, with whatever is asked for."""

    def make(**fields: Any) -> RecordedRollout:
        values = {"source": "d", "line": 1, "prompt": (1,), "output": (2, 3, 4), "sampling": SamplingParams()}
        output = fields.get("output", values["output"])
        return RecordedRollout(**{**values, "logprobs": (-1.0,) * len(output), **fields})

    return make


@pytest.fixture
def table() -> Callable[[Sequence[Floats]], TokenTable]:
    """Tokens of sequences that are off by these Δ, and otherwise drawn as they claim to be."""

    def make(deltas: Sequence[Floats]) -> TokenTable:
        lengths = [len(delta) for delta in deltas]
        delta = np.concatenate(deltas)
        contracted, entropy = np.full(len(delta), -1.5), np.full(len(delta), 1.5)
        index = np.concatenate([np.arange(length) for length in lengths])
        return TokenTable(
            sequence=np.repeat(np.arange(len(deltas)), lengths),
            index=index,
            position=index + 5,
            token=np.zeros(len(delta), dtype=np.int64),
            reported=contracted - delta,
            contracted=contracted,
            raw=contracted,
            entropy=entropy,
            variance=np.ones(len(delta)),
            by_likelihood=np.random.default_rng(1).random(len(delta)),
            by_id=np.random.default_rng(2).random(len(delta)),
            sigma=np.full(len(delta), 1e-3),
        )

    return make

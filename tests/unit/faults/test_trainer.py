from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from zerodrift import models
from zerodrift.core.cause import Layer
from zerodrift.core.errors import InvalidValue
from zerodrift.core.task import Scorer
from zerodrift.faults.registry import FAULTS, resolve
from zerodrift.faults.trainer import FaultyScorer, _packed, _positioned

LENGTHS = (40, 12, 25)
SEQUENCES = [tuple((17 * place + 71 * row) % 500 + 4 for place in range(n)) for row, n in enumerate(LENGTHS)]
UNHARMED = {
    "trainer/packing:leak": (39, 0, 0),  # the first of a row has nobody before it
    "trainer/autocast:bf16": (0, 0, 0),
    "trainer/precision:bf16-weights": (0, 0, 0),
    "trainer/micro-batch:left-padding": (39, 0, 0),  # and the longest of a batch no padding
    "trainer/positions:gap": (8, 8, 8),
    "trainer/positions:restart": (16, 11, 16),
}
"""Tokens of each sequence, from its beginning, whose numbers stay right."""


@torch.no_grad()
def sound(model: Any, sequences: Sequence[Sequence[int]] = SEQUENCES) -> list[list[float]]:
    """One sequence at a time, as the model is meant."""
    scores = []
    for ids in sequences:
        logprobs_TV = torch.log_softmax(model(torch.tensor([list(ids)])).logits[0, :-1].float(), dim=-1)
        scores.append(logprobs_TV[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist())
    return scores


@pytest.fixture(scope="module")
def model():
    return models.load("testbed:qwen3")


def test_every_one_is_held_to_what_it_leaves_right():
    assert set(UNHARMED) == {spec for spec, fault in FAULTS.items() if fault.kind is Layer.TRAINER}


@pytest.mark.parametrize("spec", UNHARMED)
def test_a_scorer_goes_wrong_where_it_says(spec, model):
    scorer, right = resolve(spec).scorer(model), sound(model)
    assert isinstance(scorer, Scorer)
    broken = scorer.score(SEQUENCES)
    assert [len(values) for values in broken] == [length - 1 for length in LENGTHS]
    for ours, theirs, unharmed in zip(broken, right, UNHARMED[spec], strict=True):
        error = np.abs(np.array(ours) - np.array(theirs))
        assert error[:unharmed].max(initial=0.0) < 1e-4
        assert unharmed == len(error) or error[unharmed:].mean() > (1e-4 if "bf16" in spec else 0.01)
    assert sound(model) == right, "the model was changed"
    assert scorer.score([]) == []


def test_alone_nothing_leaks_and_no_row_is_longer_than_the_context(model):
    long = [SEQUENCES[0] * 25, SEQUENCES[0]]
    assert [len(logits) for logits in _packed(model, long)] == [1000, 40]
    for spec, sequences in (("trainer/packing", long), ("trainer/micro-batch", SEQUENCES[1:2])):
        scores = resolve(spec).scorer(model).score(sequences)
        assert scores[-1] == pytest.approx(sound(model, sequences[-1:])[0], abs=1e-4)


def test_what_would_not_show_is_no_fault_here(model):
    """Autocast of fp64, and a constant shift."""
    with pytest.raises(InvalidValue):
        resolve("trainer/autocast").scorer(models.load("testbed:qwen3", dtype="float64")).score(SEQUENCES)
    shifted = FaultyScorer(model, _positioned(lambda index: index + 1)).score(SEQUENCES)
    assert all(a == pytest.approx(b, abs=1e-3) for a, b in zip(shifted, sound(model), strict=True))

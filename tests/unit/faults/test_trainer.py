from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from zerodrift import models
from zerodrift.core.errors import InvalidValue
from zerodrift.core.task import Scorer
from zerodrift.faults.fault import Fault
from zerodrift.faults.registry import resolve
from zerodrift.faults.trainer import FaultyScorer, _packed, _positioned

SEQUENCES = [
    tuple((17 * place + 71 * row) % 500 + 4 for place in range(n)) for row, n in enumerate((40, 12, 25))
]


class SoundScorer:
    """One sequence at a time, as the model is meant."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scores = []
        for ids in sequences:
            with torch.no_grad():
                logprobs = torch.log_softmax(
                    self._model(torch.tensor([list(ids)])).logits[0, :-1].float(), dim=-1
                )
            scores.append(logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist())
        return scores


@pytest.fixture(scope="module")
def model() -> Any:
    return models.load("testbed:qwen3")


@pytest.fixture(scope="module")
def sound(model: Any) -> list[list[float]]:
    return SoundScorer(model).score(SEQUENCES)


def errors(spec: str, model: Any, sound: list[list[float]]) -> list[np.ndarray]:
    broken = resolve(spec).scorer(model).score(SEQUENCES)
    return [np.abs(np.array(a) - np.array(b)) for a, b in zip(broken, sound, strict=True)]


def test_a_trainer_fault_is_a_scorer(trainer_fault: Fault, model: Any, sound: list[list[float]]) -> None:
    scorer = trainer_fault.scorer(model)
    assert isinstance(scorer, Scorer)
    assert [len(values) for values in scorer.score(SEQUENCES)] == [39, 11, 24]
    assert max(error.max() for error in errors(trainer_fault.spec, model, sound)) > 1e-3
    assert SoundScorer(model).score(SEQUENCES) == sound, "the model was changed"
    assert scorer.score([]) == []


def test_packed_sequences_see_those_before_them(model: Any, sound: list[list[float]]) -> None:
    first, *others = errors("trainer/packing", model, sound)
    assert first.max() < 1e-4
    assert all(error.mean() > 0.05 for error in others)


def test_rows_are_no_longer_than_the_context(model: Any) -> None:
    long = [SEQUENCES[0] * 25, SEQUENCES[0]]
    lengths = [len(logits) for logits in _packed(model, long)]
    assert lengths == [1000, 40]
    alone = SoundScorer(model).score(long[1:])[0]
    assert FaultyScorer(model, _packed).score(long)[1] == pytest.approx(alone, abs=1e-4)


def test_autocast_rounds_everything_a_little(model: Any, sound: list[list[float]]) -> None:
    for error in errors("trainer/autocast", model, sound):
        assert 1e-4 < error.mean() < 0.2


def test_autocast_does_nothing_to_fp64(model: Any) -> None:
    wide = models.load("testbed:qwen3", dtype="float64")
    with pytest.raises(InvalidValue, match="float64"):
        resolve("trainer/autocast").scorer(wide).score(SEQUENCES)


def test_padding_is_looked_at(model: Any, sound: list[list[float]]) -> None:
    longest, *shorter = errors("trainer/micro-batch", model, sound)
    assert longest.max() < 1e-4
    assert all(error.mean() > 0.05 for error in shorter)
    alone = resolve("trainer/micro-batch").scorer(model).score(SEQUENCES[1:2])[0]
    assert alone == pytest.approx(sound[1], abs=1e-4), "the number depends on the batch"


@pytest.mark.parametrize(("variant", "unharmed"), [("gap", 8), ("restart", 16)])
def test_positions_go_wrong_after_a_while(
    variant: str, unharmed: int, model: Any, sound: list[list[float]]
) -> None:
    for error in errors(f"trainer/positions:{variant}", model, sound):
        assert error[:unharmed].max() < 1e-4
        assert len(error) < unharmed or error[unharmed:].mean() > 0.01


def test_a_constant_shift_does_not_show(model: Any, sound: list[list[float]]) -> None:
    """Which is why it is no fault here."""
    shifted = FaultyScorer(model, _positioned(lambda index: index + 1)).score(SEQUENCES)
    assert all(a == pytest.approx(b, abs=1e-3) for a, b in zip(shifted, sound, strict=True))

"""Faults of the path with values that nobody planted before: what is fitted must be found wherever it is.

The faults of the registry have round and usual values. These do not, and the account must reach the floor with them: a
name by the nearest value of a grid would leave Δ standing, and be `unexplained`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.validation import ValidationConfig
from zerodrift.faults.damage import Damage, Damaged
from zerodrift.records.verdict import CauseFound, Outcome, VerdictRecord

SMALL = ValidationConfig(num_prompts=16, equivalence_trials=24, max_tokens=16)
LONG = ValidationConfig(num_prompts=16, equivalence_trials=24, max_tokens=128)
"""Outputs of which a few hundred tokens are two."""


class _Moved(nn.Module):
    """Rotary tables for other positions than those of the tokens."""

    def __init__(self, rotary: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.rotary = rotary
        self._change = change

    def forward(self, hidden_BLH: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(hidden_BLH, self._change(position_ids))


def base(factor: float) -> Damage:
    def damage(model: Any) -> None:
        parameters = dict(model.config.rope_parameters)
        parameters["rope_theta"] *= factor
        model.config.rope_parameters = parameters
        decoder = model.base_model
        tables = type(decoder.rotary_emb)(config=model.config)
        decoder.rotary_emb = tables.to(decoder.rotary_emb.inv_freq.dtype)

    return damage


def positions(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(model: Any) -> None:
        decoder = model.base_model
        decoder.rotary_emb = _Moved(decoder.rotary_emb, change)

    return damage


def late_from(place: int) -> Damage:
    return positions(lambda ids: ids + (ids >= place))


def four_bits(group: int) -> Damage:
    def damage(model: Any) -> None:
        for module in model.base_model.layers.modules():
            if isinstance(module, nn.Linear):
                groups = module.weight.data.view(module.out_features, -1, group)
                scale = groups.abs().amax(dim=-1, keepdim=True) / 7
                module.weight.data = ((groups / scale).round() * scale).flatten(-2)

    return damage


OFF_GRID = {
    "base-tripled": (base(3.0), "path/rope", "rotary base 30000 instead of 10000"),
    "stretched-by-1.07": (positions(lambda ids: ids * 1.07), "path/rope", "multiplied by 1.07:"),
    "late-from-48": (late_from(48), "path/context-boundary", "from 48 on"),
    "late-from-100": (late_from(100), "path/context-boundary", "from 100 on"),
    "four-bits-by-64": (four_bits(64), "path/weight-quantisation", "64 to a scale"),
}


@pytest.fixture
def audited(matrix, reference, tmp_path):
    def run(damage, size=SMALL):
        engine: Backend = Damaged(ReferenceBackend("testbed:llama", dtype="float32"), damage)
        record: VerdictRecord = matrix.judge(engine, reference("testbed:llama"), tmp_path, size)
        return record

    return run


def principal(record: VerdictRecord) -> CauseFound:
    assert record.verdict is Outcome.FAIL
    return next(cause for cause in record.causes if cause.gating)


TIED = pytest.mark.xfail(
    strict=False,
    reason="a jump at 48 and a first chunk of 48 fit nearly alike; on an Intel with AMX the second wins by rounding: to be mended",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=TIED if name == "late-from-48" else ()) for name in OFF_GRID]
)
def test_a_value_off_every_grid_is_named(audited, name):
    damage, cause, words = OFF_GRID[name]
    named = principal(audited(damage))
    assert (named.cause, named.explained) == (cause, pytest.approx(1.0, abs=0.02)), named.evidence
    assert words in named.evidence


def test_long_outputs_have_an_interval_of_many_sequences(audited):
    named = principal(audited(base(3.0), LONG))
    assert named.cause == "path/rope"
    assert "too few" not in named.evidence
    low, high = named.interval
    assert 0.9 < low <= named.explained <= high

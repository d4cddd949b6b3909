"""Sums of ranks: any way to deal a batch out gives the batch, and orders of sequences do not matter."""

from functools import reduce
from operator import add
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerodrift.monitor.baseline import Baseline
from zerodrift.monitor.batch import BatchSums, batch_sums
from zerodrift.monitor.breaker import Breaker
from zerodrift.monitor.cells import Expected
from zerodrift.monitor.decision import State
from zerodrift.monitor.intake import tokens_of
from zerodrift.monitor.strata import RARITIES

BASELINE = Baseline(source="canary", scales=(0.01,) * RARITIES, bias=0.0, mean_abs=0.01)
steady = settings(deadline=None, max_examples=30)
lengths = st.lists(st.integers(1, 40), min_size=2, max_size=12)


def sums(rows: list[tuple[np.ndarray, np.ndarray, int]]) -> BatchSums:
    tokens = tokens_of(
        {
            "behavior_logprobs": np.concatenate([row[0] for row in rows]),
            "old_logprobs": np.concatenate([row[1] for row in rows]),
        },
        mask=None,
        lengths=[len(row[0]) for row in rows],
        versions=np.array([row[2] for row in rows]),
        trainer_version=3,
        groups={"replica": [row[2] for row in rows]},
    )
    return batch_sums(
        tokens, epsilon=0.2, baseline=BASELINE, expect=lambda _: Expected(0.001, 1.1), correction=None
    )


def numbers(found: BatchSums) -> dict[str, Any]:
    """Everything but the order of the cells, flat."""
    plain = msgspec.to_builtins(found)
    plain["cells"] = sorted(plain["cells"], key=lambda cell: tuple(cell[:2]))
    return dict(_flat("", plain))


def _flat(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, each in value.items() for pair in _flat(f"{path}.{key}", each)]
    if isinstance(value, list | tuple):
        return [pair for place, each in enumerate(value) for pair in _flat(f"{path}.{place}", each)]
    return [(path, value)]


@steady
@given(lengths, st.integers(0, 10**6), st.integers(1, 11))
def test_any_way_to_deal_a_batch_out_gives_the_batch(counts: list[int], seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for count in counts:
        behavior = -rng.exponential(1.0, count) - 0.2
        rows.append((behavior, np.minimum(behavior + rng.normal(0, 0.1, count), 0), int(rng.integers(0, 4))))
    whole = sums(rows)
    cut = min(cut, len(rows) - 1)
    for first, second in ((rows[:cut], rows[cut:]), (rows[cut:], rows[:cut])):
        parts = reduce(add, (sums(first), sums(second)))
        one, other = numbers(whole), numbers(parts)
        assert one.keys() == other.keys()
        for key, value in one.items():
            if isinstance(value, float):
                assert other[key] == pytest.approx(value, rel=1e-9, abs=1e-9), key
            else:
                assert other[key] == value, key


@steady
@given(st.lists(st.sampled_from("b.wh"), max_size=40), st.integers(1, 5))
def test_the_breaker_halts_after_so_many_and_never_leaves_a_halt_by_itself(
    pattern: list[str], windows: int
) -> None:
    breaker, in_a_row = Breaker(), 0
    for each in pattern:
        before = breaker
        if each == "h":
            breaker, in_a_row = breaker.half_open(), 0
            continue
        breaker = breaker.update(bad=each == "b", warned=each == "w", windows=windows)
        in_a_row = in_a_row + 1 if each == "b" else 0
        if before.state is State.HALT and not before.probing:
            assert breaker == before
        elif each == "b":
            assert breaker.state is (
                State.HALT if in_a_row >= windows or before.halted_before else State.QUARANTINE
            )
        else:
            assert breaker.state in {State.OK, State.WARN}

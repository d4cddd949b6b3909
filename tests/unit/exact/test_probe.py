"""The probe passes what holds, fails what does not, and leaves the process as it found it."""

import pytest
import torch

from zerodrift.core.errors import Unproven
from zerodrift.exact import probe


def test_hard_inputs_are_hard() -> None:
    x = probe.hard(64, 200)
    exponents = x.abs().log2()
    assert float(exponents.max() - exponents.min()) > 24
    assert 0.3 < float((x[:, 1::2] / x[:, ::2] + 1).abs().lt(1e-5).float().mean()) < 0.7
    # Another order of summation shows on most rows.
    assert float((x.sum(-1) != x.flip(-1).sum(-1)).float().mean()) > 0.5
    assert torch.equal(x, probe.hard(64, 200))
    assert not torch.equal(x, probe.hard(64, 200, seed=1))
    assert probe.hard(3, 1).shape == (3, 1)


def test_bits_are_compared_not_values() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    assert not probe.same_bits(zero, -zero)
    assert probe.same_bits(nan, nan)


def test_an_op_that_looks_at_its_neighbours_is_caught() -> None:
    x = probe.hard(96, 50)
    assert list(probe.differing_counts(lambda rows: rows * 2, x)) == []
    assert set(probe.differing_counts(lambda rows: rows * len(rows), x)) == set(probe.COUNTS)
    with pytest.raises(Unproven, match=r"sum of 50.*use another machine"):
        probe.require_rows(lambda rows: rows * len(rows), 50, "sum of 50")
    probe.require_rows(lambda rows: rows.exp(), 50, "exp")


def test_a_row_that_cares_where_it_stands_is_caught() -> None:
    assert list(
        probe.differing_counts(lambda rows: rows + torch.arange(len(rows))[:, None], probe.hard(96, 5))
    )


def test_torchs_own_linear_is_caught() -> None:
    """The control on a real op: a product of one row takes another path than that of many, on every BLAS seen."""
    weight = probe.hard(300, 576, seed=3)
    assert 1 in list(
        probe.differing_counts(lambda rows: torch.nn.functional.linear(rows, weight), probe.hard(96, 576))
    )


def test_the_cheapest_variant_that_holds_is_taken() -> None:
    def make(floor: int) -> probe.Rows:
        return lambda rows: rows + (max(len(rows), floor) < 4)

    assert probe.least_floor((1, 2, 4, 8), make, probe.hard(96, 3), "x") == 4
    with pytest.raises(Unproven, match=r"x: rows change .*\[1, 2, 3\] differ even when padded to 2"):
        probe.least_floor((1, 2), make, probe.hard(96, 3), "x")


def test_threads_are_compared_and_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = set(
            probe.differing_counts(lambda rows: rows * torch.get_num_threads(), probe.hard(20, 3), (1, 2))
        )
        assert found == {1, 2, 20}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_wide_rows_are_tried_with_fewer() -> None:
    seen: list[int] = []
    probe.require_rows(lambda rows: seen.append(len(rows)) or rows, 2**15, "wide")  # type: ignore[func-returns-value]
    assert max(seen) == 17

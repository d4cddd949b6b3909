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


def counted(op: probe.Rows, columns: int, counts: tuple[int, ...] = probe.COUNTS) -> list[int]:
    """Row counts for which `op` does not hold."""
    known = probe.reference(op, probe.hard(probe.SAMPLE, columns))
    return [count for count in counts if not probe.holds(op, known, count)]


def test_an_op_that_looks_at_its_neighbours_is_caught() -> None:
    assert counted(lambda rows: rows * 2, 50) == []
    # 64 is where a row's own bits come from.
    assert counted(lambda rows: rows * len(rows), 50) == [*probe.COUNTS[:-1]]
    with pytest.raises(Unproven, match=r"sum of 50.*use another machine"):
        probe.require(lambda rows: rows * len(rows), 50, "sum of 50")
    probe.require(lambda rows: rows.exp(), 50, "exp")


def test_a_row_that_cares_where_it_stands_is_caught() -> None:
    assert counted(lambda rows: rows + torch.arange(len(rows))[:, None], 5, (18,)) == [18]


@pytest.mark.parametrize("at", [0, 16, 17, 1087, 1088, 2999])
def test_one_row_of_many_is_caught(at: int) -> None:
    def op(rows: torch.Tensor) -> torch.Tensor:
        return rows.index_fill(0, torch.tensor([at]), 0.0) if len(rows) == 3000 else rows.clone()

    assert counted(op, 5, (64, 3000, 3001)) == [3000]


def test_torchs_own_linear_is_caught() -> None:
    """The control on a real op: a product of one row takes another path than that of many, on every BLAS seen."""
    weight = probe.hard(300, 576, seed=3)
    assert 1 in counted(lambda rows: torch.nn.functional.linear(rows, weight), 576)


def test_threads_are_compared_and_given_back() -> None:
    with probe.threads(2):
        assert counted(lambda rows: rows * torch.get_num_threads(), 3, (1, 2, 64)) == [1, 2, 64]
        assert torch.get_num_threads() == 2

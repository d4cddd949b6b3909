"""Weights that lie side by side are one matrix; others are not taken for one."""

import torch

from zerodrift.exact.fused_layers import lay_side_by_side, side_by_side


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(rows, 8), requires_grad=False) for rows in (6, 2, 2)]


def test_laid_side_by_side_they_are_one_matrix_with_the_same_numbers() -> None:
    parts = weights()
    before = torch.cat([each.clone() for each in parts])
    lay_side_by_side(parts)
    joined = side_by_side(parts)

    assert joined is not None
    assert torch.equal(joined, before)
    assert all(each.is_contiguous() for each in parts)


def test_what_is_written_into_a_part_is_in_the_whole() -> None:
    """As a swap of weights does."""
    parts = weights()
    lay_side_by_side(parts)
    parts[1].copy_(torch.full((2, 8), 7.0))
    joined = side_by_side(parts)

    assert joined is not None
    assert (joined[6:8] == 7).all()
    assert (joined[:6] != 7).all()


def test_others_are_no_matrix() -> None:
    parts = weights()
    assert side_by_side(parts) is None

    lay_side_by_side(parts)
    q, k, v = parts
    assert side_by_side([k, q, v]) is None
    assert side_by_side([q, v]) is None
    assert side_by_side([q[:, :4], k[:, :4]]) is None

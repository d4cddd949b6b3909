"""The CPU's ops one by one: against torch's own within rounding, and against themselves bit for bit."""

import pytest
import torch
from torch.nn import functional

from zerodrift.core.errors import InvalidValue
from zerodrift.exact import interface, probe
from zerodrift.exact.ops.cpu import elementwise
from zerodrift.exact.ops.cpu.linear import linear, pack
from zerodrift.exact.ops.cpu.op_set import CpuOps
from zerodrift.exact.ops.cpu.step import Pages, Step
from zerodrift.exact.ops.interface import HeadShape, Query, Segments

WINDOWS = (None, 100)

TWINS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", TWINS)
def test_activations_are_torchs_within_rounding_and_the_same_everywhere(name: str) -> None:
    x = torch.linspace(-30, 30, 4001)
    safe = elementwise.ACTIVATIONS[name]
    torch.testing.assert_close(safe(x), TWINS[name](x), atol=2e-6, rtol=2e-5)
    whole = safe(x)
    for begin in range(0, 40, 3):
        for length in (1, 5, 15, 16, 17, 33):
            assert probe.same_bits(safe(x[begin : begin + length].clone()), whole[begin : begin + length])
    wide = torch.stack([x, x], dim=1)
    assert probe.same_bits(safe(wide[:, 0]), whole)


def test_silu_has_a_finite_gradient_where_exp_overflows() -> None:
    x = torch.tensor([-200.0, -88.0, -5.0, 0.0, 3.0, 200.0], requires_grad=True)
    elementwise.silu(x).sum().backward()
    twin = x.detach().clone().requires_grad_()
    functional.silu(twin).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, twin.grad)
    assert torch.autograd.gradcheck(
        elementwise.silu, (torch.randn(7, dtype=torch.float64, requires_grad=True),)
    )


def test_soft_cap() -> None:
    x = torch.tensor([-1e4, -1.0, 0.0, 1.0, 1e4])
    torch.testing.assert_close(elementwise.soft_cap(x, 30.0), 30 * torch.tanh(x / 30))
    assert float(elementwise.soft_cap(x, 30.0).abs().max()) <= 30


def test_a_padded_linear_gives_only_the_rows_asked_for() -> None:
    weight, x, bias = torch.randn(9, 5), torch.randn(3, 5), torch.randn(9)
    torch.testing.assert_close(linear(x, pack(weight), bias, 8), functional.linear(x, weight, bias))


def test_unknown_plain_ops_are_refused() -> None:
    with pytest.raises(InvalidValue, match="softmax"):
        CpuOps(frozenset({"softmax"}))


def test_facts_name_the_variants() -> None:
    assert CpuOps().facts()["attention"] == "blocks-64-global-max"
    assert CpuOps(frozenset({"attention", "linear", "activation"})).facts() == {
        "linear": "plain",
        "attention": "sdpa",
        "activation": "plain",
        "isa": CpuOps().facts()["isa"],
        "blas": CpuOps().facts()["blas"],
    }


@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (6, 2), (5, 1)])
def test_attention_is_that_of_sdpa_within_rounding(window: int | None, heads: int, kv: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(200, count, 16, generator=generator) for count in (heads, kv, kv))
    shape, segments = HeadShape(0.25, window), Segments((0, 130, 131), (130, 131, 190))
    found = CpuOps().attend(q, (k, v), segments, shape)
    expected = CpuOps(frozenset({"attention"})).attend(q, (k, v), segments, shape)
    torch.testing.assert_close(found, expected)
    assert bool((found[190:] == 0).all())


@pytest.mark.parametrize("window", [None, 3])
def test_the_backward_of_attention(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(12, count, 4, dtype=torch.float64, generator=generator, requires_grad=True)
        for count in (4, 2, 2)
    )
    how = (CpuOps(), Segments((0, 7), (7, 12)), HeadShape(0.5, window))
    assert torch.autograd.gradcheck(lambda *qkv: interface._Attention.apply(*qkv, how), (q, k, v))


def queries(*lasts: int, size: int = 16) -> list[Query]:
    return [
        Query(index, index + 1, last, torch.arange(last // size + 1) + 100 * index)
        for index, last in enumerate(lasts)
    ]


def test_decoding_sequences_are_grouped_by_length() -> None:
    step = Step(queries(5, 900, 30, 910, 200), Pages(16, 2), WINDOWS)
    singles = step.singles(None)
    assert sorted(singles.tokens_S.tolist()) == [0, 1, 2, 3, 4]
    assert [(group.begin, group.end) for group in singles.groups] == [(0, 2), (2, 3), (3, 5)]
    assert [group.gather.length for group in singles.groups] == [960, 256, 64]
    assert step.singles(None) is singles
    assert step.chunks == []
    assert Step([], Pages(16, 2), WINDOWS).singles(None).groups == []


def test_a_group_holds_only_so_many_keys() -> None:
    singles = Step(queries(*[1000] * 10), Pages(16, 2), WINDOWS).singles(None)
    assert [group.end - group.begin for group in singles.groups] == [3, 3, 3, 1]


def test_a_window_gathers_only_what_it_sees() -> None:
    step = Step(queries(1000, 990), Pages(24, 1), WINDOWS)
    singles = step.singles(100)
    (group,) = singles.groups
    assert (group.gather.first, group.gather.length) == (832, 192)
    assert group.gather.offset == 832 - 34 * 24
    seen = ~group.hidden.hidden_nl
    assert seen.sum(-1).tolist() == [100, 100]


def test_missing_pages_are_filled_with_the_sequences_own() -> None:
    step = Step(queries(130, 3), Pages(16, 1), WINDOWS)
    rows = step._gather(queries(130, 3), 0, 192).rows.view(2, -1)
    assert rows[0].tolist() == [*range(9), 0, 0, 0]
    assert rows[1].tolist() == [100] * 12

"""A device that brings its own norm and log-softmax: they take the model's place, with the right gradients."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from zerodrift import exact, models
from zerodrift.core.errors import FingerprintMismatch
from zerodrift.exact import normalisation, preparation
from zerodrift.exact.fingerprint import require_same
from zerodrift.exact.modules import ExactNorm, _Norm
from zerodrift.exact.ops.cpu.op_set import CpuOps
from zerodrift.exact.ops.interface import NormGain


def plain_norm(x: torch.Tensor, gain: NormGain) -> torch.Tensor:
    return (gain.weight_H + gain.one_plus) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + gain.eps))


class WithNorm(CpuOps):
    rms_norm = staticmethod(plain_norm)  # type: ignore[assignment]


@pytest.fixture
def with_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_ops_for", lambda _, plain: WithNorm(plain))


@pytest.mark.usefixtures("with_norm")
@pytest.mark.parametrize("name", ["testbed:qwen3", "testbed:gemma3"])
def test_the_devices_norm_is_used_and_given_back(name: str) -> None:
    model: Any = models.load(name)
    kind, ids = type(model.model.norm), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        own = model(ids).logits
        exact.prepare(model)
        assert isinstance(model.model.layers[0].self_attn.q_norm, ExactNorm)
        torch.testing.assert_close(model(ids).logits, own, atol=2e-5, rtol=0)
    exact.restore(model)
    assert type(model.model.norm) is kind
    assert not hasattr(model.model.norm, "exact_ops")


@pytest.mark.parametrize("one_plus", [False, True])
def test_the_gradient_of_the_norm(one_plus: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 3, 8, generator=generator), torch.randn(8, generator=generator)
    pairs = []
    for norm in (
        lambda x, weight: _Norm.apply(x, weight, (1e-6, one_plus, WithNorm())),
        lambda x, weight: plain_norm(x, NormGain(weight, 1e-6, one_plus)),
    ):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        norm(*inputs).square().sum().backward()
        pairs.append([each.grad for each in inputs])
    torch.testing.assert_close(pairs[0], pairs[1])


def test_the_gradient_of_log_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = ModuleType("zerodrift.exact.ops.triton.vocabulary")
    vocabulary.log_softmax = lambda logits: torch.log_softmax(logits, dim=-1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, vocabulary.__name__, vocabulary)
    logits = torch.randn(
        3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    assert torch.autograd.gradcheck(normalisation._LogSoftmax.apply, (logits,))


def test_different_numerics_are_refused() -> None:
    require_same({"isa": "AVX2"}, {"isa": "AVX2"})
    with pytest.raises(FingerprintMismatch, match="isa is AVX2 in the engine and None in the trainer"):
        require_same({"isa": "AVX2", "torch": "2.13"}, {"torch": "2.13"})

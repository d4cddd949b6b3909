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


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class WithNorm(CpuOps):
    rms_norm = staticmethod(plain_norm)  # type: ignore[assignment]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(preparation, "_ops_for", lambda _, plain: WithNorm(plain))
    return models.load("testbed:qwen3")


def test_the_devices_norm_is_used_and_given_back(model: Any) -> None:
    kind, ids = type(model.model.norm), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        own = exact.prepare(models.load("testbed:qwen3"))(ids).logits
        exact.prepare(model)
        assert isinstance(model.model.layers[0].self_attn.q_norm, ExactNorm)
        assert torch.equal(model(ids).logits, own)
    exact.restore(model)
    assert type(model.model.norm) is kind
    assert not hasattr(model.model.norm, "exact_ops")


def test_the_gradient_of_the_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 3, 8, generator=generator), torch.randn(8, generator=generator)
    pairs = []
    for norm in (
        lambda *inputs: _Norm.apply(*inputs, 1e-6, WithNorm()),
        lambda *inputs: plain_norm(*inputs, 1e-6),
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

"""Experts of a device that multiplies by all of them at once: the loop's numbers, the loop's gradients.

The device is torch here; which rows stand where is what the real one keeps to, too.
Shapes: T tokens, E experts, K experts of a token, P pairs of token and expert.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch

from zerodrift import exact, models
from zerodrift.core.errors import UnsupportedModel
from zerodrift.exact import experts, preparation
from zerodrift.exact.grouped_experts import ExactGroupedExperts, routed_at_once
from zerodrift.exact.ops.cpu.op_set import CpuOps
from zerodrift.exact.ops.interface import ExpertRows


class Groups(NamedTuple):
    order_P: torch.Tensor
    expert_P: torch.Tensor
    """In that order."""
    per_token: int


class AtOnce:
    route = staticmethod(experts.routed)

    def groups(self, experts_TK: torch.Tensor, num_experts: int) -> Groups:
        expert_P, order_P = torch.sort(experts_TK.flatten(), stable=True)
        assert int(expert_P[-1]) < num_experts
        return Groups(order_P, expert_P, experts_TK.shape[1])

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, groups: Groups, rows: ExpertRows
    ) -> torch.Tensor:
        to_groups = rows is ExpertRows.TOKENS_TO_GROUPS
        own = x[groups.order_P // groups.per_token] if to_groups else x
        made = torch.einsum("pk,pnk->pn", own, weight[groups.expert_P])
        return made if to_groups else torch.empty_like(made).index_copy(0, groups.order_P, made)

    def grad_of_rows(
        self, grad: torch.Tensor, weight: torch.Tensor, groups: Groups, rows: ExpertRows
    ) -> torch.Tensor:
        weight = weight[groups.expert_P]
        if rows is ExpertRows.GROUPS_TO_PAIRS:
            return torch.einsum("pn,pnk->pk", grad[groups.order_P], weight)
        by_group = torch.einsum("pn,pnk->pk", grad, weight)
        by_pair = torch.empty_like(by_group).index_copy(0, groups.order_P, by_group)
        return by_pair.view(-1, groups.per_token, by_pair.shape[-1]).sum(1)

    def grad_of_weight(
        self, grad: torch.Tensor, x: torch.Tensor, groups: Groups, rows: ExpertRows
    ) -> torch.Tensor:
        to_groups = rows is ExpertRows.TOKENS_TO_GROUPS
        x, grad = (x[groups.order_P // groups.per_token], grad) if to_groups else (x, grad[groups.order_P])
        every = torch.zeros(NUM_EXPERTS, grad.shape[1], x.shape[1], dtype=x.dtype)
        return every.index_add(0, groups.expert_P, torch.einsum("pn,pk->pnk", grad, x))

    def combine(self, made_PH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return (made_PH.view(*weights_TK.shape, -1) * weights_TK[..., None]).sum(1)


class Grouping(CpuOps):
    experts = AtOnce()  # type: ignore[assignment]

    def gated(self, activation: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = activation(gate) * up
        return made


NUM_EXPERTS = 8
NAME = "testbed:qwen3-moe"
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def grouping(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(preparation, "_ops_for", lambda _, plain: Grouping(plain))
    return exact.prepare(models.load(NAME))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, model.config.vocab_size)
    (model(IDS).logits * weights).mean().backward()
    return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


def test_numbers_and_gradients_are_the_loops(grouping: Any) -> None:
    loop = models.load(NAME)
    assert isinstance(grouping.model.layers[0].mlp.experts, ExactGroupedExperts)
    with torch.no_grad():
        torch.testing.assert_close(grouping(IDS).logits, loop(IDS).logits, atol=1e-4, rtol=0)
    found, wanted = gradients(grouping), gradients(loop)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(
            found[name], grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max()), msg=name
        )


def test_frozen_experts_get_no_gradient(grouping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in grouping.model.layers:
        layer.mlp.experts.requires_grad_(requires_grad=False)
    monkeypatch.setattr(AtOnce, "grad_of_weight", None)
    found = gradients(grouping)
    assert "model.layers.0.mlp.gate.weight" in found
    assert not [name for name in found if ".experts." in name]


def test_they_are_given_back(grouping: Any) -> None:
    loop = models.load(NAME)
    exact.restore(grouping)
    assert type(grouping.model.layers[0].mlp.experts) is type(loop.model.layers[0].mlp.experts)
    assert not hasattr(grouping.model.layers[0].mlp.experts, "exact_ops")
    assert torch.equal(grouping(IDS).logits, loop(IDS).logits)


def test_other_dtypes_are_refused(grouping: Any) -> None:
    own = copy.deepcopy(grouping.model.layers[0].mlp.experts)
    chosen = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(UnsupportedModel, match="float64 activations meet experts"):
        own(torch.zeros(3, own.hidden_dim, dtype=torch.float64), chosen, torch.ones(3, 2))


@pytest.mark.parametrize("normalise", [False, True])
def test_the_gradient_of_a_choice(normalise: bool) -> None:
    logits = torch.randn(5, NUM_EXPERTS, generator=torch.Generator().manual_seed(0))
    grads = []
    for route in (
        lambda x: routed_at_once(AtOnce(), x, 3, normalise=normalise),  # type: ignore[arg-type]
        lambda x: experts.routed(x, 3, normalise=normalise),
    ):
        x = logits.clone().requires_grad_()
        weights, _ = route(x)
        (weights * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)

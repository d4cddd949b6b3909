"""Routers and experts whose result for a token does not depend on the tokens that go the same way.

A token's experts are added up in order of their numbers, whoever else was routed to them; equal probabilities go to the
lower number. Weights of experts are stacked in one tensor and packed one by one, as those of a linear are. A device that
multiplies by all of them at once has experts of its own (`grouped_experts.py`).
Shapes: T tokens, E experts, K experts of a token, H hidden size, I inner size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from zerodrift.core.errors import UnsupportedModel
from zerodrift.exact.grouped_experts import ExactGroupedExperts, routed_at_once
from zerodrift.exact.modules import Pack, exact_linear
from zerodrift.exact.ops.interface import ExpertOps, Ops


def routed(logits_TE: torch.Tensor, count: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers of the `count` likeliest experts, likeliest first."""
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    # topk leaves open which of two equals comes first; a stable sort does not.
    sorted_TE, order_TE = torch.sort(probs_TE, dim=-1, descending=True, stable=True)
    weights_TK, experts_TK = sorted_TE[:, :count], order_TE[:, :count]
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK.to(logits_TE.dtype), experts_TK


def chosen(
    at_once: ExpertOps | None, logits_TE: torch.Tensor, count: int, *, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, by the device's own kernel where it has one."""
    if at_once is None:
        return routed(logits_TE, count, normalise=normalise)
    return routed_at_once(at_once, logits_TE, count, normalise=normalise)


class ExactRouter:
    """What a router's class is mixed with."""

    weight: torch.Tensor
    top_k: int
    norm_topk_prob: bool
    hidden_dim: int
    exact_pack: Pack
    exact_routing: list[tuple[torch.Tensor, torch.Tensor]] | None

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits of all experts, weights and numbers of the chosen ones."""
        x_TH = hidden.reshape(-1, self.hidden_dim)
        logits_TE = exact_linear(x_TH, self.weight, None, self.exact_pack)
        weights_TK, experts_TK = chosen(
            self.exact_pack.ops.experts, logits_TE, self.top_k, normalise=self.norm_topk_prob
        )
        if self.exact_routing is not None:
            self.exact_routing.append((experts_TK.detach(), weights_TK.detach()))
        return logits_TE, weights_TK, experts_TK


class ExactExperts:
    """What the class of experts is mixed with."""

    num_experts: int
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    act_fn: Any
    exact_packs: Sequence[tuple[Pack, Pack, Pack]]
    """Of each expert: gate, up, down."""

    def forward(
        self, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Each token's experts, weighted and added in order of their numbers."""
        out_TH = torch.zeros_like(hidden_TH)
        weights = self.expert_weights()
        for expert in sorted(set(experts_TK.flatten().tolist())):
            tokens, places = torch.where(experts_TK == expert)
            x_NH = hidden_TH[tokens]
            # One by one, not stacked: the activation then works on the very rows that a linear has made.
            gate, up, down = (
                partial(exact_linear, weight_NK=weight, bias_N=None, pack=pack)
                for weight, pack in zip(weights[expert], self.exact_packs[expert], strict=True)
            )
            made_NH = down(self.act_fn(gate(x_NH)) * up(x_NH)) * weights_TK[tokens, places, None]
            out_TH = out_TH.index_add(0, tokens, made_NH)
        return out_TH

    def packed(self) -> list[tuple[Any, None]]:
        """Every matrix of every expert in the layout of the ops; none has a bias."""
        every = zip(self.exact_packs, self.expert_weights(), strict=True)
        return [(pack.of(weight), None) for each in every for pack, weight in zip(*each, strict=True)]

    def expert_weights(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Gate, up and down of each expert, [I, H], [I, H] and [H, I]."""
        # Unbound at once: a gradient through 128 slices of one tensor would be 128 tensors of its size.
        halves = [each.chunk(2) for each in self.gate_up_proj.unbind(0)]
        downs = self.down_proj.unbind(0)
        return [(gate, up, down) for (gate, up), down in zip(halves, downs, strict=True)]


def exchange_router(module: Any, ops: Ops) -> None:
    """Make a router exact in place."""
    module.exact_pack, module.exact_routing = Pack(ops), None
    module.__class__ = type("ExactRouter", (ExactRouter, type(module)), {})


def exchange_experts(module: Any, ops: Ops) -> None:
    """Make experts exact in place."""
    if ops.experts is not None:
        module.exact_ops = ops
        module.__class__ = type("ExactExperts", (ExactGroupedExperts, type(module)), {})
        return
    module.exact_packs = [(Pack(ops), Pack(ops), Pack(ops)) for _ in range(module.num_experts)]
    module.__class__ = type("ExactExperts", (ExactExperts, type(module)), {})


def give_back_experts(module: Any) -> None:
    """Undo either."""
    if isinstance(module, ExactRouter):
        del module.exact_pack, module.exact_routing
    elif isinstance(module, ExactGroupedExperts):
        del module.exact_ops
    else:
        del module.exact_packs
    module.__class__ = type(module).__bases__[1]


class Routing:
    """Which experts the tokens of one or several forwards went to, in the order of those forwards."""

    def __init__(self, recorded: dict[int, list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        """`recorded` is filled while forwards run."""
        self._recorded = recorded

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have a router."""
        return tuple(self._recorded)

    def experts(self, layer: int) -> torch.Tensor:
        """Numbers [T, K], likeliest first."""
        return torch.cat([experts for experts, _ in self._recorded[layer]])

    def weights(self, layer: int) -> torch.Tensor:
        """What each of them counted, [T, K]."""
        return torch.cat([weights for _, weights in self._recorded[layer]])


@contextmanager
def recorded_routing(model: Any) -> Iterator[Routing]:
    """Keep where each token goes while inside; a step that is computed twice (checkpointing) is kept twice."""
    routers = {
        index: module
        for index, layer in enumerate(model.base_model.layers)
        for module in layer.modules()
        if isinstance(module, ExactRouter)
    }
    if not routers:
        raise UnsupportedModel(
            "no router of this model is exact; prepare a model with experts (zerodrift.exact.prepare) first"
        )
    recorded: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {index: [] for index in routers}
    for index, router in routers.items():
        router.exact_routing = recorded[index]
    try:
        yield Routing(recorded)
    finally:
        for router in routers.values():
            router.exact_routing = None

"""An engine's forward over the modules of a prepared model, with all that stands between two products in one kernel.

A layer of a dense model is 28 kernels as its own modules compute it, and 9 here, where weights that meet the same rows lie
side by side (`join`): one product instead of three. Attention, experts and parameters are the same. Only where the device's
ops can (`ops.fuses`), and only for families without anything unusual.
It is held against the modules' own forward when it first runs, and not used unless every bit agrees.
Shapes: T tokens, H hidden size, C kv heads, D head size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from zerodrift.exact.ops.interface import HeadShape
from zerodrift.models.family.base import AttentionPlaces, Family, MlpPlaces
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.rope import rope_types

_PROOF_TOKENS = (1, 65)
"""Held against the modules at the first step of so many tokens or more: products change hands at 65."""


class _Dense(NamedTuple):
    """A feed-forward part of three products."""

    gate: Any
    up: Any
    down: Any
    activation: Any


class _Sparse(NamedTuple):
    """A router and experts, which are few kernels already: they are called as they are."""

    router: Any
    experts: Any


class _Layer(NamedTuple):
    norm: Any
    q: Any
    k: Any
    v: Any
    o: Any
    head_norms: tuple[Any, Any] | None
    after_attention: Any | None
    """Norm of what attention gives, where the family has one."""
    mlp_norm: Any
    feed: _Dense | _Sparse
    after_feed: Any | None
    shape: HeadShape
    rotary: tuple[str, ...]
    """What the rotary module is told beside positions: the type of the layer, where each type has its own base."""


class FusedLayers:
    """All layers of one model."""

    def __init__(self, parts: ModelParts, ops: Any) -> None:
        """`parts` is of a family that `can_fuse`."""
        self.ops, self.embedding, self.rotary = ops, parts.embedding, parts.rotary
        self.final_norm = parts.final_norm
        self.head_dim = parts.family.head_dim(parts.model.config)
        self._layers = [_layer_of(parts, index) for index in range(len(parts.layers))]
        self._unproven = list(_PROOF_TOKENS)

    def to_prove(self, tokens: int) -> bool:
        """Whether a step of so many tokens is one that was not held against the modules yet."""
        asked = [least for least in self._unproven if tokens >= least]
        self._unproven = [least for least in self._unproven if tokens < least]
        return bool(asked)

    def __call__(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: Any) -> torch.Tensor:
        """Hidden states [T, H] after the final norm; K and V of the tokens are written."""
        hidden_TH: torch.Tensor = self.embedding(token_ids_T)
        tables = {
            kind: tuple(
                part[0].contiguous() for part in self.rotary(hidden_TH[None], positions_T[None], *kind)
            )
            for kind in dict.fromkeys(layer.rotary for layer in self._layers)
        }
        norms = [*(layer.norm for layer in self._layers[1:]), self.final_norm]
        x_TH: torch.Tensor = self._layers[0].norm(hidden_TH)
        for index, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            pages = step.pages(index)
            parts = self._products(x_TH, (layer.q, layer.k, layer.v))
            qkv = tuple(part.view(len(part), -1, self.head_dim) for part in parts)
            head_norms = layer.head_norms and tuple(norm.exact_gain for norm in layer.head_norms)
            q_THD = self.ops.heads(qkv, head_norms, tables[layer.rotary], step.rows, pages)
            out_THD = self.ops.attend_paged(q_THD, pages, step.plan, layer.shape)
            added_TH = layer.o(out_THD.flatten(1))
            hidden_TH, x_TH = self._add_norm(hidden_TH, added_TH, layer.mlp_norm, layer.after_attention)
            added_TH = self._fed(layer.feed, x_TH)
            hidden_TH, x_TH = self._add_norm(hidden_TH, added_TH, next_norm, layer.after_feed)
        return x_TH

    def join(self) -> None:
        """Lay weights that meet the same rows side by side. Parameters move: only of a model that nobody else holds."""
        for layer in self._layers:
            dense = ((layer.feed.gate, layer.feed.up),) if isinstance(layer.feed, _Dense) else ()
            for linears in ((layer.q, layer.k, layer.v), *dense):
                lay_side_by_side([each.weight for each in linears])
                if all(each.bias is not None for each in linears):
                    lay_side_by_side([each.bias for each in linears])

    def _fed(self, feed: _Dense | _Sparse, x_TH: torch.Tensor) -> torch.Tensor:
        if isinstance(feed, _Dense):
            gate_up = self._products(x_TH, (feed.gate, feed.up))
            out_TH: torch.Tensor = feed.down(self.ops.gated(feed.activation.function, *gate_up))
        else:
            _, weights_TK, experts_TK = feed.router(x_TH)
            out_TH = feed.experts(x_TH, experts_TK, weights_TK)
        return out_TH

    def _products(self, x_TH: torch.Tensor, linears: Sequence[Any]) -> Sequence[torch.Tensor]:
        """x Wᵀ + b of each: one product where the weights lie side by side, since every column has its own sum."""
        weight_NH = side_by_side([each.weight for each in linears])
        biases = [each.bias for each in linears]
        none = all(each is None for each in biases)
        bias_N = None if any(each is None for each in biases) else side_by_side(biases)
        if weight_NH is None or (bias_N is None and not none):
            return [each(x_TH) for each in linears]
        out_TN: torch.Tensor = self.ops.linear(x_TH, weight_NH, bias_N)
        return torch.split_with_sizes(out_TN, [each.out_features for each in linears], dim=1)

    def _add_norm(self, hidden: torch.Tensor, added: torch.Tensor, norm: Any, of_added: Any | None) -> Any:
        return self.ops.add_norm(hidden, added, norm.exact_gain, of_added and of_added.exact_gain)


def lay_side_by_side(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Into one storage, one after another."""
    joined = torch.cat([each.data for each in parameters])
    parts = torch.split_with_sizes(joined, [len(each) for each in parameters])
    for each, part in zip(parameters, parts, strict=True):
        each.data = part


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view of tensors that follow each other in memory; None where they do not."""
    first, end = tensors[0].detach(), tensors[0].data_ptr()
    for each in tensors:
        same = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or each.data_ptr() != end or not each.is_contiguous():
            return None
        end += each.nbytes
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def can_fuse(family: Family) -> bool:
    """Whether a layer of it is what `FusedLayers` computes: with two norms, or with four, two of them of what is added."""
    plain = isinstance(family.attention, AttentionPlaces) and isinstance(family.mlp, MlpPlaces)
    usual = family.norm_offset in (0, 1) and len(family.norms) in (2, 4)
    return plain and usual and not (family.attention.fused or family.mlp.fused)  # type: ignore[union-attr]


def _layer_of(parts: ModelParts, index: int) -> _Layer:
    family, config, layer = parts.family, parts.model.config, parts.layers[index]
    assert family.attention is not None, "only of a family that can be fused"
    attention = parts.attention(index)
    head_norms = None
    if family.attention.norms:
        q_norm, k_norm = (attention.get_submodule(family.attention.norms[role]) for role in "qk")
        head_norms = (q_norm, k_norm)
    norm, *norms = (layer.get_submodule(place) for place in family.norms)
    after_attention, mlp_norm, after_feed = norms if len(norms) == 3 else (None, *norms, None)
    shape = HeadShape(family.scale(config), family.windows(config)[index])
    q, k, v, o = (attention.get_submodule(family.attention.projections[role]) for role in "qkvo")
    feed = _feed_of(parts, index)
    kind = () if "" in rope_types(config) else (config.layer_types[index],)
    return _Layer(norm, q, k, v, o, head_norms, after_attention, mlp_norm, feed, after_feed, shape, kind)


def _feed_of(parts: ModelParts, index: int) -> _Dense | _Sparse:
    family, layer = parts.family, parts.layers[index]
    if family.experts is not None and family.sparse_layers(parts.model.config)[index]:
        router, experts = family.experts.router, family.experts.place
        return _Sparse(parts.at(router, "router", layer), parts.at(experts, "experts", layer))
    assert family.mlp is not None, "only of a family that can be fused"
    mlp = parts.at(family.mlp.place, "feed-forward part", layer)
    gate, up, down = (mlp.get_submodule(family.mlp.projections[role]) for role in ("gate", "up", "down"))
    return _Dense(gate, up, down, mlp.get_submodule(str(family.mlp.activation)))

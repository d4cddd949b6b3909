"""Levers of a transformers model: where they are, and how they are moved while one batch runs.

Hooks multiply, and are gone when the batch is; weights are never written to. Every lever has one number for each row of
the batch, so that one backward gives the derivative of every row by itself. Shapes: B rows, L positions, S numbers of a
lever.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from zerodrift.audit.response.in_attention import ATTENTION, IN_ATTENTION, LEVERS, register
from zerodrift.audit.response.levers import Effect, Lever
from zerodrift.models.family.abilities import has_a_choice_of_attention
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.registry import FAMILIES

BANDS = 8
"""Bands of rotary frequencies: those of one band turn at speeds within a factor of 4 of each other, at a base of 10,000."""
_EPS_NAMES = ("variance_epsilon", "eps")
Values = Mapping[Lever, torch.Tensor]
"""What every lever stands at: [B, S]."""


class Plumbing:
    """The levers of one model."""

    def __init__(self, model: Any) -> None:
        """Only looks; `turned` is what hooks, and unhooks."""
        self.model = model
        self.parts = ModelParts(model)
        self.missing: list[str] = []
        """What this model has no part for, or none that is known here."""
        self._modules: dict[Lever, Any] = {}
        self._tables = list(self.parts.frequencies())
        self._find()

    @property
    def levers(self) -> list[Lever]:
        """In the order of the forward, but for logits, which have no module."""
        return list(self._modules)

    @contextmanager
    def turned(self, values: Values, prompt_lengths: Sequence[int]) -> Iterator[None]:
        """The model with its levers at `values`, for one batch whose prompts have these lengths."""
        starts_B = torch.tensor(list(prompt_lengths), device=self.model.device)
        # The public setter has no public getter.
        before = self.model.config._attn_implementation  # noqa: SLF001
        with ExitStack() as stack:
            if any(lever.kind in IN_ATTENTION for lever in values):
                register()
                self.model.set_attn_implementation(ATTENTION)
                stack.callback(self.model.set_attn_implementation, before)
            for lever, t_BS in values.items():
                if lever in self._modules:
                    self._turn(stack, lever, t_BS, starts_B)
            yield

    def _turn(self, stack: ExitStack, lever: Lever, t_BS: torch.Tensor, starts_B: torch.Tensor) -> None:
        module = self._modules[lever]
        if lever.kind in IN_ATTENTION:
            known = module.__dict__.setdefault(LEVERS, {})
            known[lever.kind] = t_BS
            if lever.kind is Effect.HEAD_POSITION:
                ((table, name),) = self._tables
                known[lever.kind] = t_BS[:, :, None] * getattr(table, name).to(t_BS.dtype)
            stack.callback(known.pop, lever.kind)
        elif lever.kind in _BEFORE:
            handle = module.register_forward_pre_hook(partial(_BEFORE[lever.kind], t_BS))
            stack.callback(handle.remove)
        elif lever.kind in _INTO_LAYER:
            handle = module.register_forward_pre_hook(
                partial(_into, partial(_INTO_LAYER[lever.kind], t_BS)), with_kwargs=True
            )
            stack.callback(handle.remove)
        elif lever.kind in (Effect.ROTARY, Effect.OFFSET):
            turn = partial(_rotate, lever, t_BS, starts_B)
            stack.callback(module.register_forward_hook(turn, with_kwargs=True).remove)
        else:
            turn = partial(_AFTER[lever.kind], t_BS)
            stack.callback(module.register_forward_hook(turn).remove)

    def _find(self) -> None:
        family = self.parts.family
        if family.layers is None:
            self.missing.append("layers")
        else:
            for number, layer in enumerate(self.parts.layers):
                self._find_in_layer(number, layer)
        self._find_norm(None, "final norm", _at(self.model, family.below_decoder(family.final_norm)))
        self._find_rotary()
        kinds = {lever.kind for lever in self._modules}
        wanted = {
            Effect.SCORES: "attention scores and keys and values in fp8",
            Effect.HEAD: "outputs of heads",
            Effect.NORM_EPS: "norms",
            Effect.SLOPE: "activations",
            Effect.ROTARY: "rotary frequencies",
        }
        self.missing += [words for kind, words in wanted.items() if kind not in kinds]
        if not kinds & {Effect.NEURON, Effect.EXPERT}:
            self.missing.append("neurons and experts")

    def _find_in_layer(self, number: int, layer: Any) -> None:
        family, config = self.parts.family, self.model.config
        heads = getattr(config, "num_attention_heads", 0)
        self._modules[Lever(Effect.RESIDUAL, number, "", 1)] = layer
        if number == 0:
            self._add_bias(Effect.EMBEDDED_BIAS, number, layer)
        for place in family.norms:
            self._find_norm(number, place, _at(layer, place))
        attention = None if family.attention is None else _at(layer, family.attention.place)
        if attention is not None and family.attention is not None:
            for role, place in family.attention.norms.items():
                self._find_norm(number, f"{role} norm", _at(attention, place), of_heads=True)
            if has_a_choice_of_attention(self.model):
                self._modules[Lever(Effect.SCORES, number, "", heads)] = attention
                self._modules[Lever(Effect.KEYS_FP8, number, "", 1)] = attention
                self._modules[Lever(Effect.VALUES_FP8, number, "", 1)] = attention
                self._modules[Lever(Effect.SINK, number, "", heads)] = attention
                self._modules[Lever(Effect.SCORE_CAP, number, "", 1)] = attention
                if self._turned_alike():
                    self._modules[Lever(Effect.HEAD_POSITION, number, "", heads)] = attention
            self._find_offsets(number, attention, family.attention.projections)
            self._add_bias(Effect.ATTENTION_BIAS, number, attention)
            output = _at(attention, family.attention.projections.get("o"))
            if output is not None and _inputs(output) % heads == 0:
                self._modules[Lever(Effect.HEAD, number, "", heads)] = output
        self._find_feed_forward(number, layer)

    def _find_offsets(self, number: int, attention: Any, projections: Mapping[str, str]) -> None:
        """Where each of queries, keys and values has a projection of its own."""
        config = self.model.config
        heads = getattr(config, "num_attention_heads", 0)
        stored = getattr(config, "num_key_value_heads", None) or heads
        for offset, channel, role, count in (
            (Effect.QUERY_OFFSET, Effect.QUERY_CHANNEL, "q", heads),
            (Effect.KEY_OFFSET, Effect.KEY_CHANNEL, "k", stored),
            (Effect.VALUE_OFFSET, Effect.VALUE_CHANNEL, "v", stored),
        ):
            projection = _at(attention, projections.get(role))
            width = 0 if projection is None else len(projection.weight)
            if width and count and width % count == 0:
                self._modules[Lever(offset, number, "", count)] = projection
                self._modules[Lever(channel, number, "", width, block=width // count)] = projection

    def _add_bias(self, kind: Effect, number: int, module: Any) -> None:
        width = getattr(self.model.config, "hidden_size", None)
        if width and module is not None:
            self._modules[Lever(kind, number, "", width, block=width)] = module

    def _turned_alike(self) -> bool:
        """One table of frequencies for all layers, laid out as families are that are described."""
        return self.model.config.model_type in FAMILIES and len(self._tables) == 1

    def _find_feed_forward(self, number: int, layer: Any) -> None:
        family = self.parts.family
        block = None if family.experts is None else _at(layer, family.experts.block)
        dense = None if family.mlp is None else _at(layer, family.mlp.place)
        self._add_bias(Effect.MLP_BIAS, number, dense if block is None else block)
        experts = None if family.experts is None else _at(layer, family.experts.place)
        if experts is not None and hasattr(experts, "num_experts"):
            self._modules[Lever(Effect.EXPERT, number, "", experts.num_experts)] = experts
            return
        down = None if dense is None or family.mlp is None else _at(dense, family.mlp.projections.get("down"))
        if down is not None:
            self._modules[Lever(Effect.NEURON, number, "", _inputs(down))] = down
        if dense is not None and family.mlp is not None:
            inside = {Effect.SLOPE: family.mlp.activation, Effect.GATE: family.mlp.projections.get("gate")}
            for kind, place in inside.items():
                if (module := _at(dense, place)) is not None:
                    self._modules[Lever(kind, number, "", 1)] = module

    def _find_norm(self, layer: int | None, place: str, norm: Any, *, of_heads: bool = False) -> None:
        eps = next((getattr(norm, name) for name in _EPS_NAMES if hasattr(norm, name)), None)
        if eps is not None:
            self._modules[Lever(Effect.NORM_GAIN, layer, place, 1, of_heads=of_heads)] = norm
            self._modules[Lever(Effect.NORM_EPS, layer, place, 1, eps, of_heads=of_heads)] = norm

    def _find_rotary(self) -> None:
        if self.model.config.model_type not in FAMILIES:
            # Others may lay cosines out in another order.
            return
        for module, name in self._tables:
            size = min(BANDS, getattr(module, name).shape[-1])
            self._modules[Lever(Effect.ROTARY, None, name, size)] = module
            self._modules[Lever(Effect.OFFSET, None, name, 1)] = module


def turned_logits(values: Values, logits_BTV: torch.Tensor) -> torch.Tensor:
    """Logits with those levers moved that have no module."""
    for lever, t_BS in values.items():
        t_BS1 = t_BS[:, :, None]
        if lever.kind is Effect.LOGIT_SCALE:
            logits_BTV = logits_BTV * (1 + t_BS1)
        elif lever.kind is Effect.SOFT_CAP:
            logits_BTV = _capped(t_BS1, logits_BTV)
        elif lever.kind is Effect.LOGIT_ROW:
            rows = torch.tensor(lever.labels, device=logits_BTV.device)
            logits_BTV = logits_BTV.index_add(2, rows, t_BS[:, None].expand(-1, logits_BTV.shape[1], -1))
    return logits_BTV


def _capped(t_B11: torch.Tensor, logits_BTV: torch.Tensor) -> torch.Tensor:
    """c · tanh(x / c), where t is 1/c². Near t = 0, where a derivative is wanted, it is x − t·x³/3."""
    if t_B11.requires_grad:
        return logits_BTV - t_B11 * logits_BTV**3 / 3
    cap_B11 = t_B11.clamp(min=1e-12).rsqrt()
    return cap_B11 * torch.tanh(logits_BTV / cap_B11)


def _heads(t_BS: torch.Tensor, _: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    whole = given[0]
    turned = whole.unflatten(-1, (t_BS.shape[1], -1)) * (1 + t_BS)[:, None, :, None]
    return (turned.flatten(-2), *given[1:])


def _neurons(t_BS: torch.Tensor, _: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (given[0] * (1 + t_BS)[:, None], *given[1:])


def _into(
    turn: Callable[[torch.Tensor], torch.Tensor], _: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hidden states come first, or by their name."""
    if not given:
        return given, {**named, "hidden_states": turn(named["hidden_states"])}
    return (turn(given[0]), *given[1:]), named


def _residual(t_B1: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * (1 + _spread(t_B1, hidden))


def _embedded(t_BS: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + t_BS[:, None]


def _slope(t_B1: torch.Tensor, activation: Any, given: tuple[Any, ...], _: torch.Tensor) -> torch.Tensor:
    steeper = 1 + _spread(t_B1, given[0])
    # Past the hooks of the module, of which this is one.
    turned: torch.Tensor = activation.forward(given[0] * steeper) / steeper
    return turned


def _experts(t_BS: torch.Tensor, _: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, chosen_NK, weights_NK = given
    rows_N = torch.arange(len(chosen_NK), device=chosen_NK.device) // (len(chosen_NK) // len(t_BS))
    return hidden, chosen_NK, weights_NK * (1 + t_BS[rows_N].gather(1, chosen_NK)).to(weights_NK.dtype)


def _added(t_BS: torch.Tensor, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    by_head = output.view(*output.shape[:-1], t_BS.shape[1], -1) + t_BS[:, None, :, None]
    return by_head.flatten(-2)


def _channels(t_BS: torch.Tensor, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + t_BS)[:, None]


def _biased(t_BS: torch.Tensor, _: Any, __: Any, output: Any) -> Any:
    """Attention gives its hidden states first of several."""
    if isinstance(output, tuple):
        return (output[0] + t_BS[:, None], *output[1:])
    return output + t_BS[:, None]


def _gain(t_B1: torch.Tensor, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + _spread(t_B1, output))


def _eps(t_B1: torch.Tensor, norm: Any, given: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    bias, hidden = getattr(norm, "bias", None), given[0]
    # A norm with a bias is one that takes the mean away.
    centred = hidden if bias is None else hidden - hidden.mean(dim=-1, keepdim=True)
    eps = next(getattr(norm, name) for name in _EPS_NAMES if hasattr(norm, name))
    size = centred.pow(2).mean(dim=-1, keepdim=True) + eps
    factor = (size / (size + _spread(t_B1, output)).clamp(min=1e-30)).sqrt()
    turned: torch.Tensor = output * factor if bias is None else bias + (output - bias) * factor
    return turned


def _rotate(  # noqa: PLR0913 - a hook, with what it is bound to
    lever: Lever,
    t_BS: torch.Tensor,
    starts_B: torch.Tensor,
    module: Any,
    given: tuple[Any, ...],
    named: dict[str, Any],
    output: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = named.get("layer_type", given[2] if len(given) > 2 else None)
    if kind is not None and lever.place != f"{kind}_inv_freq":
        return output
    positions_BL = named["position_ids"] if "position_ids" in named else given[1]
    speeds_F = getattr(module, lever.place).to(t_BS.dtype)
    cos, sin = output
    if lever.kind is Effect.OFFSET:
        late_BL = (positions_BL >= starts_B[:, None]).to(t_BS.dtype)
        angles_BLF = (t_BS * late_BL)[:, :, None] * speeds_F
    else:
        bands_F = torch.arange(len(speeds_F), device=speeds_F.device) * t_BS.shape[1] // len(speeds_F)
        angles_BLF = positions_BL[:, :, None].to(t_BS.dtype) * (speeds_F * t_BS[:, bands_F])[:, None]
    angles_BLD = torch.cat((angles_BLF, angles_BLF), dim=-1)
    turn, rise = angles_BLD.cos(), angles_BLD.sin()
    return (cos * turn - sin * rise).to(cos.dtype), (sin * turn + cos * rise).to(sin.dtype)


def _spread(t_B1: torch.Tensor, over: torch.Tensor) -> torch.Tensor:
    """One number for each row of the batch, in as many dimensions as `over` has."""
    return t_B1.view(-1, *[1] * (over.dim() - 1))


def _at(holder: Any, place: str | None) -> Any:
    """The module at a place; None where there is none."""
    try:
        return None if holder is None or place is None else holder.get_submodule(place)
    except AttributeError:
        return None


def _inputs(projection: Any) -> int:
    """Width of what goes into a projection; in GPT-2's, inputs come first."""
    return int(getattr(projection, "in_features", None) or projection.weight.shape[0])


_BEFORE: dict[Effect, Callable[..., Any]] = {
    Effect.HEAD: _heads,
    Effect.NEURON: _neurons,
    Effect.EXPERT: _experts,
}
_INTO_LAYER: dict[Effect, Callable[..., torch.Tensor]] = {
    Effect.RESIDUAL: _residual,
    Effect.EMBEDDED_BIAS: _embedded,
}
_AFTER: dict[Effect, Callable[..., Any]] = {
    Effect.NORM_GAIN: _gain,
    Effect.NORM_EPS: _eps,
    Effect.GATE: _gain,
    Effect.SLOPE: _slope,
    Effect.QUERY_OFFSET: _added,
    Effect.KEY_OFFSET: _added,
    Effect.VALUE_OFFSET: _added,
    Effect.QUERY_CHANNEL: _channels,
    Effect.KEY_CHANNEL: _channels,
    Effect.VALUE_CHANNEL: _channels,
    Effect.ATTENTION_BIAS: _biased,
    Effect.MLP_BIAS: _biased,
}

"""What can be said about a model's parts, as data: which places they have, which classes, which numbers. Torch-free.

A place is a dotted path below the module that holds it; None where a model has no such part, or where it was not
found. `parts.py` finds the modules of a given model by it, `check.py` holds it against them.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from zerodrift.core.errors import UnsupportedModel
from zerodrift.core.frozen import FrozenFacts


class Fused(msgspec.Struct, frozen=True):
    """Several projections in one tensor, one after another and of equal size."""

    place: str
    roles: tuple[str, ...]
    dim: int = -2
    """Along which they lie: -2 where outputs come first, as in `nn.Linear`."""


_QKVO = MappingProxyType({"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"})
_GATED = MappingProxyType({"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})


class AttentionPlaces(FrozenFacts, frozen=True):
    """Below a layer: attention."""

    place: str = "self_attn"
    projections: Mapping[str, str] = _QKVO
    """Role to place below the attention."""
    fused: Fused | None = None
    norms: Mapping[str, str] = MappingProxyType({})
    """`q` and `k`: norms of single heads."""
    window: Literal["none", "every-layer", "layer-types"] = "none"
    """Which layers see only `config.sliding_window` keys: none, all, or those that `config.layer_types` says."""
    scale_setting: str | None = None
    """Scores are divided by the root of this setting instead of that of the head size."""


class MlpPlaces(FrozenFacts, frozen=True):
    """Below a layer: a dense feed-forward part."""

    place: str = "mlp"
    projections: Mapping[str, str] = _GATED
    activation: str | None = "act_fn"
    fused: Fused | None = None


class ExpertPlaces(msgspec.Struct, frozen=True):
    """Below a layer: a router and experts, whose weights are stacked in tensors of three dimensions."""

    block: str = "mlp"
    router: str = "mlp.gate"
    place: str = "mlp.experts"
    gate_up: Fused = Fused("gate_up_proj", ("gate", "up"))
    down: str = "down_proj"
    activation: str = "act_fn"


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One family of models."""

    name: str
    """As people call it."""
    model_type: str
    prefix: str
    """What the names of its classes in transformers begin with."""
    exact_on: frozenset[str] = frozenset()
    """Devices on which exact mode is proven to run it."""

    decoder: str | None = "model"
    decoder_class: str = "Model"
    embedding: str | None = "embed_tokens"
    embedding_class: str = "Embedding"
    layers: str | None = "layers"
    final_norm: str | None = "norm"
    rotary: str | None = "rotary_emb"
    head: str | None = "lm_head"

    attention: AttentionPlaces | None = AttentionPlaces()
    mlp: MlpPlaces | None = MlpPlaces()
    experts: ExpertPlaces | None = None
    sparse: Callable[[Any], tuple[bool, ...]] | None = None
    """Which layers have experts instead of a dense part, by the configuration."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Below a layer."""
    norm_class: str = "RMSNorm"
    norm_offset: float = 0.0
    """The gain of a norm is this plus its weight."""

    activation_setting: str = "hidden_act"
    embedding_scaled: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    logit_cap_setting: str | None = None
    """Logits are squeezed into ± this setting, where it is set."""
    ignored_settings: tuple[str, ...] = ()
    """Settings that transformers reads and does not apply, while an engine may: refused where they are set."""

    def layer_of(self, tensor: str) -> int | None:
        """Which layer a tensor belongs to, by its name. Where layers were not found, the first number is one."""
        found = self._layer_number.search(tensor)
        return int(found["layer"]) if found else None

    def in_layer(self, tensor: str, layer: int) -> str:
        """The name that the same tensor has in another layer."""
        return self._layer_number.sub(rf"\g<before>{layer}.", tensor, count=1)

    @property
    def _layer_number(self) -> re.Pattern[str]:
        holder = "" if self.layers is None else re.escape(self.layers) + r"\."
        return re.compile(rf"(?P<before>(?:^|\.){holder})(?P<layer>\d+)\.")

    def is_norm(self, tensor: str) -> bool:
        """Whether a tensor is a norm's, by its name; where norms were not found, by what norms are called."""
        leaf = tensor.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if not self.norms:
            return "norm" in leaf or leaf.startswith("ln_")
        inside = () if self.attention is None else tuple(self.attention.norms.values())
        names = {place.rpartition(".")[2] for place in (*self.norms, *inside, self.final_norm or "")}
        return leaf in names

    def is_embedding(self, tensor: str) -> bool:
        """Whether a tensor is the embedding, by its name."""
        return self.embedding is not None and tensor.removesuffix(".weight").endswith(self.embedding)

    def below_decoder(self, place: str | None) -> str | None:
        """A place from the model's root."""
        return place if place is None or self.decoder is None else f"{self.decoder}.{place}"

    def sparse_layers(self, config: Any) -> tuple[bool, ...]:
        """For each layer, whether it has experts."""
        return (False,) * config.num_hidden_layers if self.sparse is None else self.sparse(config)

    def windows(self, config: Any) -> tuple[int | None, ...]:
        """For each layer, how many keys a query sees; None sees all."""
        if self.attention is None or self.attention.window == "none":
            return tuple(None for _ in range(config.num_hidden_layers))
        window = self._setting(config, "sliding_window", self._attention_place)
        if self.attention.window == "every-layer":
            return tuple(window for _ in range(config.num_hidden_layers))
        types = self._setting(config, "layer_types", self._attention_place)
        return tuple(window if each == "sliding_attention" else None for each in types)

    def head_dim(self, config: Any) -> int:
        """Size of a head."""
        size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return size

    def scale(self, config: Any) -> float:
        """What scores are multiplied by."""
        setting = None if self.attention is None else self.attention.scale_setting
        if setting is None:
            return float(self.head_dim(config) ** -0.5)
        divisor = self._setting(config, setting, self._attention_place)
        if not isinstance(divisor, int | float) or divisor <= 0:
            raise UnsupportedModel(
                f"{self._attention_place} is described with scores divided by the root of {setting}, which is {divisor!r}"
            )
        return float(divisor**-0.5)

    def embedding_scale(self, config: Any) -> float:
        """What embeddings are multiplied by."""
        return float(config.hidden_size**0.5) if self.embedding_scaled else 1.0

    def logit_cap(self, config: Any) -> float | None:
        """Logits lie within plus and minus this."""
        if self.logit_cap_setting is None:
            return None
        cap: float | None = self._setting(config, self.logit_cap_setting, str(self.head))
        return cap

    @property
    def _attention_place(self) -> str:
        """In messages, that of every layer."""
        inside = "" if self.attention is None else f".{self.attention.place}"
        return f"{self.below_decoder(self.layers)}.*{inside}"

    def _setting(self, config: Any, name: str, place: str) -> Any:
        """A setting that the description of a place relies on."""
        if not hasattr(config, name):
            raise UnsupportedModel(
                f"{place} is described by the setting {name}, which a {type(config).__name__} does not have: {self.name}'s "
                "file is wrong about it, or the model is of another family"
            )
        return getattr(config, name)

    def classes(self, config: Any) -> dict[str, str]:
        """Every module of such a model: place to the name of its class, but for activations."""
        root, own = f"{self.decoder}.", self.prefix
        found = {
            "": f"{own}ForCausalLM",
            f"{self.decoder}": f"{own}{self.decoder_class}",
            f"{root}{self.embedding}": own + self.embedding_class if self.embedding_scaled else "Embedding",
            f"{root}{self.layers}": "ModuleList",
            f"{root}{self.final_norm}": own + self.norm_class,
            f"{root}{self.rotary}": f"{own}RotaryEmbedding",
            f"{self.head}": "Linear",
        }
        for index, sparse in enumerate(self.sparse_layers(config)):
            place = f"{root}{self.layers}.{index}"
            found[place] = f"{own}DecoderLayer"
            found |= {f"{place}.{below}": kind for below, kind in self._layer_classes(sparse=sparse).items()}
        return found

    def _layer_classes(self, *, sparse: bool) -> dict[str, str]:
        own = self.prefix
        found = dict.fromkeys(self.norms, own + self.norm_class)
        if self.attention is not None:
            found[self.attention.place] = f"{own}Attention"
            for place in self.attention.projections.values():
                found[f"{self.attention.place}.{place}"] = "Linear"
            for place in self.attention.norms.values():
                found[f"{self.attention.place}.{place}"] = own + self.norm_class
        if sparse and self.experts is not None:
            found |= {
                self.experts.block: f"{own}SparseMoeBlock",
                self.experts.router: f"{own}TopKRouter",
                self.experts.place: f"{own}Experts",
            }
        elif self.mlp is not None:
            found[self.mlp.place] = f"{own}MLP"
            found |= {f"{self.mlp.place}.{place}": "Linear" for place in self.mlp.projections.values()}
        return found

    def activations(self, config: Any) -> tuple[str, ...]:
        """Places of activations."""
        found = []
        for index, sparse in enumerate(self.sparse_layers(config)):
            holder: Any = self.experts if sparse else self.mlp
            found.append(f"{self.below_decoder(self.layers)}.{index}.{holder.place}.{holder.activation}")
        return tuple(found)

"""The reference engine with a model that computes something else.

The model is copied before it is damaged, and damaged again after every weight update: a fault of the path outlives
the weights. The embedding keeps its dtype in every damage, so the engine's fingerprint says what it always said.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.backends.base import Backend
from zerodrift.core.errors import UnsupportedModel
from zerodrift.core.version import WeightVersion
from zerodrift.faults.wrapper import FaultyBackend, clone, the_reference

Damage = Callable[[Any], None]
"""Changes a transformers causal LM in place."""


class DamagedReference(FaultyBackend):
    """Generates and scores with the damaged copy of the model."""

    inside = True

    def __init__(self, engine: Backend, damage: Damage) -> None:
        super().__init__(clone(engine))
        self._damage = damage
        self._apply()

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """New weights, same fault. The version's digest is that of the weights as they were delivered."""
        self.inner.load_weights(directory, version)
        self._apply()

    def _apply(self) -> None:
        reference = the_reference(self.inner)
        reference.model = copy.deepcopy(reference.model)
        self._damage(reference.model)
        reference.teacher = copy.copy(reference.teacher)
        reference.teacher.model = reference.model


def decoder_of(model: Any) -> Any:
    """The decoder stack, which has the parts that all supported families have."""
    decoder = model.base_model
    for part in ("embed_tokens", "layers", "norm", "rotary_emb"):
        if not hasattr(decoder, part):
            raise UnsupportedModel(
                f"{type(model).__name__} has no {part} where faults expect it; use a Llama, Qwen or Mistral"
            )
    return decoder


class Head(nn.Module):
    """The output head, with another way of multiplying; it keeps the weights and the tie of the one it replaces."""

    def __init__(self, head: Any, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """`multiply` takes hidden states [B, L, H] and weights [V, H], and gives logits [B, L, V]."""
        super().__init__()
        self.head = head
        self._multiply = multiply

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        """Logits in the dtype of the hidden states, as an engine widens them before its softmax."""
        return self._multiply(hidden_BLH, self.head.weight).to(hidden_BLH.dtype)


def replace_head(model: Any, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Have `model` compute its logits with `multiply`."""
    model.set_output_embeddings(Head(model.get_output_embeddings(), multiply))

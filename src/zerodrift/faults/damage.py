"""One of our own engines with a model that computes something else.

The model is copied before it is damaged, and damaged again after every weight update: a fault of the path outlives
the weights. The embedding keeps its dtype in every damage, so the engine's fingerprint says what it always said.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift import exact
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.version import WeightVersion
from zerodrift.faults.wrapper import FaultyBackend, Plant, clone, the_host

Damage = Callable[[Any], None]
"""Changes a transformers causal LM in place."""


class Damaged(FaultyBackend):
    """Generates and scores with the damaged copy of the model."""

    inside = True

    def __init__(self, engine: Backend, damage: Damage) -> None:
        super().__init__(clone(engine))
        self._damage = damage
        self._sound = self._model
        self._apply()

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """New weights, same fault. The version's digest is that of the weights as they were delivered."""
        # Into the sound model: the exact engine takes only tensors that its model has, by name.
        self._model = self._sound
        self.inner.load_weights(directory, version)
        self._sound = self._model
        self._apply()

    def _apply(self) -> None:
        model = copy.deepcopy(self._sound)
        self._damage(model)
        # Weights that the exact engine has packed were packed before the damage.
        exact.refresh(model)
        self._model = model

    @property
    def _model(self) -> Any:
        host = the_host(self.inner)
        return host.model if isinstance(host, ReferenceBackend) else host.engine.runner.model

    @_model.setter
    def _model(self, model: Any) -> None:
        host = the_host(self.inner)
        if isinstance(host, ReferenceBackend):
            host.model = model
            host.teacher = copy.copy(host.teacher)
            host.teacher.model = model
        else:
            host.engine.runner.model = model


def damaged(damage: Damage) -> Plant:
    """Plants a damage."""
    return lambda engine: Damaged(engine, damage)


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

    @property
    def weight(self) -> torch.Tensor:
        """Where the exact engine looks whether the model is sharded."""
        return self.head.weight  # type: ignore[no-any-return]

    def rounded_to(self, hidden_RH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As the exact engine asks for logits: each row is a request of its own."""
        return self(hidden_RH[:, None])[:, 0].to(dtype)  # type: ignore[no-any-return]


def replace_head(model: Any, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Have `model` compute its logits with `multiply`."""
    model.set_output_embeddings(Head(model.get_output_embeddings(), multiply))

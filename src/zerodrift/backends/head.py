"""The last step of a model by itself: from hidden states to logits, a few rows at a time.

It runs the model's own forward, in which only the layers are left out: whatever a model does with its logits (Gemma
caps them, Granite and Cohere scale them) is done here too. Shapes: T rows, H hidden size, V vocabulary.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch


class _Given(torch.nn.Module):
    """In place of the layers: what they have made already comes in as embeddings, and goes out."""

    def __init__(self, kind: type[Any]) -> None:
        """`kind` is what the layers return; models read fields of it that others do not have."""
        super().__init__()
        self._kind = kind

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        """All other fields are None."""
        return self._kind(last_hidden_state=inputs_embeds)


def own_head(model: Any, kind: type[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Hidden states to logits, [T, H] to [T, V], as `model` does it; its layers return a `kind`.

    The model itself is not changed: this is a shallow copy, and shares its weights.
    """
    headed = copy.copy(model)
    headed._modules = {**model._modules, model.base_model_prefix: _Given(kind)}  # noqa: SLF001 - no public way

    @torch.no_grad()
    def head(hidden_TH: torch.Tensor) -> torch.Tensor:
        logits_TV: torch.Tensor = headed(inputs_embeds=hidden_TH[None], use_cache=False).logits[0]
        return logits_TV

    return head

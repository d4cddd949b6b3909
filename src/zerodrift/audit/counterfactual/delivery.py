"""What else may an update have done, if it did not simply arrive or stay away? Each is a model to compare with.

Values that arrived under another name, in another dtype, at one end of a tie only, or beside a buffer that was not
rebuilt: the engine would then answer exactly like the model built here.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from zerodrift.audit.counterfactual.exchanged import LIKELY, exchanges, has
from zerodrift.models.copies import sharing
from zerodrift.models.family.parts import ModelParts


class Delivery(NamedTuple):
    """One way for an update to go wrong."""

    cause: str
    message: str
    build: Callable[[], Any]
    """The model that the engine would then be."""


def deliveries(old: Any, new: Any) -> Iterator[Delivery]:
    """Every way that is known and that this model has the parts for, from the likeliest to the oddest."""
    parts = ModelParts(new)
    yield Delivery("weights/dtype", "the update arrived rounded to bf16", lambda: _rounded(new))
    yield Delivery(
        "weights/dtype",
        "vectors (norms, biases) arrived rounded to bf16",
        lambda: _rounded(new, lambda parameter: parameter.dim() == 1),
    )
    if _tied(new):
        yield Delivery(
            "weights/tied-head", "the embedding was updated and the head was not", lambda: _untied(new, old)
        )
        yield Delivery(
            "weights/tied-head",
            "the head was updated and the embedding was not",
            lambda: _untied(old, new, new),
        )
    if any(True for _ in parts.frequencies()):
        yield Delivery(
            "weights/buffer", "rotary frequencies rounded to bf16", lambda: _with_frequencies(new, _to_bf16)
        )
        yield Delivery(
            "weights/buffer", "rotary frequencies zero", lambda: _with_frequencies(new, torch.zeros_like)
        )
    if parts.family.rotary is not None:
        yield Delivery("weights/buffer", "rotary tables zero", lambda: _without_tables(new))
    if has(parts, "gate", "up"):
        yield Delivery(
            "weights/swapped",
            f"rows of {parts.role_name('gate')} and {parts.role_name('up')} arrived in turn, where one was expected "
            "after the other",
            lambda: _interleaved(new),
        )
    for exchange in exchanges(new):
        yield Delivery(exchange.cause, exchange.message, partial(exchange.build, new))


def not_asked(model: Any) -> tuple[str, ...]:
    """Ways for an update to go wrong that this model has no parts for, or none under a name that is known here."""
    parts = ModelParts(model)
    missing = [
        f"{one} and {other} projections exchanged" for one, other in LIKELY[:3] if not has(parts, one, other)
    ]
    if parts.family.layers is None:
        missing.append("layers exchanged or moved")
    if not any(True for _ in parts.frequencies()):
        missing.append("rotary frequencies left wrong")
    return tuple(missing)


def _tied(model: Any) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def _rounded(model: Any, which: Callable[[torch.Tensor], bool] = lambda _: True) -> Any:
    changed = sharing(model)
    for parameter in filter(which, changed.parameters()):
        parameter.data = _to_bf16(parameter.data)
    return changed


def _to_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def _untied(body: Any, head: Any, rest: Any = None) -> Any:
    """`body`'s embedding under `head`'s head; every other tensor is `rest`'s, or `body`'s where not given."""
    changed = sharing(body if rest is None else rest)
    # The old weights may wait on the host.
    device = (rest or body).device
    weight = head.get_input_embeddings().weight.detach().to(device, copy=True)
    embedding = body.get_input_embeddings().weight.detach().to(device, copy=True)
    changed.get_input_embeddings().weight = torch.nn.Parameter(embedding, requires_grad=False)
    changed.get_output_embeddings().weight = torch.nn.Parameter(weight, requires_grad=False)
    return changed


@torch.no_grad()
def _interleaved(model: Any) -> Any:
    changed = ModelParts(copy.deepcopy(model))
    for layer in range(len(changed.layers)):
        for gate, up in zip(changed.projection(layer, "gate"), changed.projection(layer, "up"), strict=True):
            # Rows are the last dimension but one, of a bias the only one.
            rows = -2 if gate.dim() > 1 else -1
            packed = torch.stack([gate, up], dim=rows).flatten(rows - 1, rows)
            for target, half in zip((gate, up), packed.chunk(2, dim=rows), strict=True):
                target.copy_(half)
    return changed.model


class _NoTables(torch.nn.Module):
    """Cosines and sines of zero: attention sees neither positions nor queries."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = self.rotary(*args, **options)
        return torch.zeros_like(cosines), torch.zeros_like(sines)


def _without_tables(model: Any) -> Any:
    changed = ModelParts(sharing(model))
    changed.replace_rotary(_NoTables(changed.rotary))
    return changed.model


def _with_frequencies(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = sharing(model)
    for module, name in list(ModelParts(changed).frequencies()):
        setattr(module, name, change(getattr(module, name)))
    return changed

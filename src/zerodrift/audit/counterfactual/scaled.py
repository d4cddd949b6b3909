"""What is multiplied by far too much or too little: embeddings, and attention scores. One number each, by any factor.

A factor near 1 is found by its derivative (`audit/response/`). One of 16, or of the root of a width that one side forgot,
is beyond any derivative: it is looked for among powers of two and roots, and the best look is refined.
"""

import math
from functools import partial
from typing import Any

from zerodrift.audit.counterfactual.position import Dial, by_secants
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.models.copies import sharing
from zerodrift.models.family.parts import ModelParts
from zerodrift.records.evidence import LocatedEvidence

POWERS = tuple(2.0**power for power in range(-7, 8) if power)
REACH = math.log(2)
"""How far one secant may go: from one look to the next."""


def scale_dials(model: Any) -> list[Dial]:
    """Those that this model has the parts for."""
    found = []
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None:
        width = float(model.config.hidden_size)
        found.append(_dial(width, "embeddings", _with_embeddings))
        if head is not None and head.weight is embedding.weight:
            found.append(_dial(width, "tensor of embedding and head", _with_tied_tensor))
    if attentions := _scaled_attentions(model):
        size = ModelParts(model).family.head_dim(model.config)
        found.append(_dial(float(size), f"attention scores of {len(attentions)} layers", _with_scores))
    return found


def _dial(width: float, part: str, build: Any) -> Dial:
    roots = {width**0.5, width**-0.5, width**0.25, width**-0.25, width, 1 / width}
    looks = tuple(sorted({*POWERS, *roots} - {1.0}))
    return Dial(looks, partial(by_secants, reach=REACH), partial(_variant, part, build))


def _variant(part: str, build: Any, factor: float) -> Variant:
    where = LocatedEvidence(
        part=part, quantity="scale", estimate=factor, low=factor, high=factor, neutral=1.0, r2=1.0
    )
    return Variant(UNEXPLAINED, f"{part} multiplied by {factor:.9g}", partial(build, factor), located=where)


def _with_embeddings(factor: float, model: Any) -> Any:
    changed = sharing(model)
    changed.get_input_embeddings().register_forward_hook(lambda _, __, hidden: hidden * factor)
    return changed


def _with_tied_tensor(factor: float, model: Any) -> Any:
    changed = sharing(model)
    weight = changed.get_input_embeddings().weight
    weight.data = weight.data * factor
    return changed


def _with_scores(factor: float, model: Any) -> Any:
    changed = sharing(model)
    for attention in _scaled_attentions(changed):
        attention.scaling = attention.scaling * factor
    return changed


def _scaled_attentions(model: Any) -> list[Any]:
    parts = ModelParts(model)
    if parts.family.layers is None or parts.family.attention is None:
        return []
    found = [_at(layer, parts.family.attention.place) for layer in parts.layers]
    return [each for each in found if isinstance(getattr(each, "scaling", None), float)]


def _at(layer: Any, place: str) -> Any:
    """None in layers of another kind."""
    try:
        return layer.get_submodule(place)
    except AttributeError:
        return None

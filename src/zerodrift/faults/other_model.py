"""A fault of address: what answers is not the model that was asked for."""

from typing import Any

import torch

from zerodrift.faults.damage import Damaged
from zerodrift.faults.fault import Fault, Need


def _drawn_anew(model: Any) -> None:
    """Every tensor keeps its values and loses their order, so that nothing but the function is another."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            order = torch.randperm(parameter.numel(), generator=generator)
            parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))


OTHER_MODEL_FAULTS = (
    Fault(
        "weights/other-model",
        "another-seed",
        "Serves a model of the same architecture with other weights, under the same name.",
        lambda engine: Damaged(engine, _drawn_anew),
        (Need.INSIDE,),
    ),
)

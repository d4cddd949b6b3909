"""What decides the bits of a prepared model, as text that two processes compare before they trust each other."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from zerodrift.core.errors import FingerprintMismatch
from zerodrift.exact.preparation import ops_of, parameters_on


def numeric_fingerprint(model: Any) -> dict[str, str]:
    """Op variants, block sizes, dtypes, instruction set and library versions. Thread counts are not among them:
    the bits do not depend on them, which is proven for each count before it is used."""
    ops = ops_of(model)
    device = parameters_on(model)
    return {
        "kernels": "zerodrift-exact-1",
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_dtype": "float32",
        "logprobs_dtype": "float32",
        "device": device.type,
        "threads": "any",
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        **ops.facts(),
    }


def require_same(engine: Mapping[str, str], trainer: Mapping[str, str]) -> None:
    """Two processes compute alike, or `FingerprintMismatch` names what differs."""
    differing = {
        name: (engine.get(name), trainer.get(name))
        for name in sorted({*engine, *trainer})
        if engine.get(name) != trainer.get(name)
    }
    if differing:
        listed = "; ".join(
            f"{name} is {ours} in the engine and {theirs} in the trainer"
            for name, (ours, theirs) in differing.items()
        )
        raise FingerprintMismatch(
            f"{listed}: their logprobs are not the same bits; run both with the same numerics"
        )

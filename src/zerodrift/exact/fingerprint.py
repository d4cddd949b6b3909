"""What decides the bits of a prepared model, as text that two processes compare before they trust each other."""

from typing import Any

import torch
import transformers

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

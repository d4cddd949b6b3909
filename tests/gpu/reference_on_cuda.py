"""Does a reference on CUDA say what the same reference says on the processor?

    python tests/gpu/reference_on_cuda.py > reference.json

Every built-in model in fp64 and fp32, in every layout and in every variant that attribution asks about: the largest
|Δ| between the two devices must stay below what rounding in fp32 moves anyway. In fp64 too: there transformers takes norms
and rotary tables in fp32. Weights are quantised in fp64 alone, where no two devices round one of them to either side.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from zerodrift.backends import variants
from zerodrift.backends.reference import load_reference
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.config.model import Device
from zerodrift.models.testbed_config import CONFIGS

MOST = {"float64": 1e-5, "float32": 5e-5}
"""6e-6 and 3e-5 were seen."""
QUANTISED = "4-bit weights"
VARIANTS: Mapping[str, Callable[[Any], Any]] = {
    "as it is": lambda model: model,
    "theta doubled": lambda model: variants.with_rope_theta(
        model, 2 * model.config.rope_parameters["rope_theta"]
    ),
    QUANTISED: lambda model: variants.with_quantised_weights(model, 4),
    "head in itself": lambda model: variants.with_head(model, model.dtype),
}


def scored(spec: str, dtype: str, device: Device) -> dict[str, np.ndarray]:
    """Logprobs of the same tokens, by what computed them."""
    rng = np.random.default_rng(0)
    model = load_reference(spec, dtype, device).model
    vocabulary = model.config.vocab_size
    sequences = [rng.integers(0, vocabulary, length).tolist() for length in (5, 40, 111)]
    found = {}
    for name, vary in VARIANTS.items():
        if name == QUANTISED and dtype != "float64":
            continue
        for layout in Layout:
            rows = Teacher(vary(model), layout=layout).logprobs(sequences, [2, 10, 50])
            found[f"{name}, {layout.value}"] = torch.cat(list(rows)).double().numpy()
    return found


def main() -> int:
    told: dict[str, dict[str, float]] = {}
    for name in CONFIGS:
        for dtype in MOST:
            here, there = (scored(f"testbed:{name}", dtype, device) for device in ("cpu", "cuda"))
            told[f"{name} {dtype}"] = {kind: float(np.abs(here[kind] - there[kind]).max()) for kind in here}
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    return int(any(max(each.values()) > MOST[name.split()[1]] for name, each in told.items()))


if __name__ == "__main__":
    sys.exit(main())

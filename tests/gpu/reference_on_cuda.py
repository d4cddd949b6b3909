"""Does a reference on CUDA say what the same reference says on the processor?

    python tests/gpu/reference_on_cuda.py > reference.json

Every built-in model in fp64 and fp32, in every layout, with all logits at once and a few at a time, and in variants that
attribution asks about; and what it generates, where the same noise must choose the same tokens in fp64: the largest
|Δ| between the two devices must stay below what rounding in fp32 moves anyway. In fp64 too: there transformers takes norms
and rotary tables in fp32. Weights are quantised in fp64 alone, where no two devices round one of them to either side.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from zerodrift.backends import teacher as teaching
from zerodrift.backends import variants
from zerodrift.backends.reference import ReferenceBackend, load_reference
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.config.model import Device
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.models.family.rope import rope_bases
from zerodrift.models.testbed_config import CONFIGS

DEVICES: tuple[Device, Device] = ("cpu", "cuda")
MOST = {"float64": 1e-5, "float32": 5e-5}
"""6e-6 and 3e-5 were seen."""
QUANTISED, Q4_0 = "4-bit weights", "Q4_0 weights"
FEW = 4 * 512 * 8
"""Bytes of logits at a time: layers and head are then called by themselves."""
VARIANTS: Mapping[str, Callable[[Any], Any]] = {
    "as it is": lambda model: model,
    "theta doubled": lambda model: variants.with_rope_bases(
        model, {kind: 2 * base for kind, base in rope_bases(model.config).items()}
    ),
    QUANTISED: lambda model: variants.with_quantised_weights(model, 4),
    Q4_0: variants.with_q4_0_weights,
    "fp8 KV": variants.with_fp8_kv,
    "no window": variants.without_window,
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
        if name in (QUANTISED, Q4_0, "fp8 KV") and dtype != "float64":
            continue
        for layout in Layout:
            rows = Teacher(vary(model), layout=layout).logprobs(sequences, [2, 10, 50])
            found[f"{name}, {layout.value}"] = torch.cat(list(rows)).double().numpy()
    with patch.object(teaching, "ROWS_BYTES", FEW):
        rows = Teacher(model, layout=Layout.PADDED).logprobs(sequences, [2, 10, 50])
        found["few at a time"] = torch.cat(list(rows)).double().numpy()
    return found


def generated(spec: str, device: Device) -> tuple[list[int], np.ndarray]:
    """Tokens of a few requests, and their logprobs."""
    backend = ReferenceBackend(spec, dtype="float64", device=device)
    requests = [
        Request(Prompt(tuple(range(4, 4 + length))), SamplingParams(max_tokens=24, seed=length))
        for length in (3, 17, 60)
    ]
    samples = [answer.completions[0] for answer in backend.generate(requests)]
    tokens = [token for sample in samples for token in sample.token_ids]
    return tokens, np.array([value for sample in samples for value in sample.logprobs])


def main() -> int:
    told: dict[str, dict[str, float]] = {}
    for name in CONFIGS:
        for dtype in MOST:
            here, there = (scored(f"testbed:{name}", dtype, device) for device in DEVICES)
            told[f"{name} {dtype}"] = {kind: float(np.abs(here[kind] - there[kind]).max()) for kind in here}
        (tokens, first), (others, second) = (generated(f"testbed:{name}", at) for at in DEVICES)
        same = float(np.abs(first - second).max()) if tokens == others else np.inf
        told[f"{name} float64"]["generated"] = same
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    return int(any(max(each.values()) > MOST[name.split()[1]] for name, each in told.items()))


if __name__ == "__main__":
    sys.exit(main())

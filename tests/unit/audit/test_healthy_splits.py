"""Healthy engines, fp32 and bf16: nothing parts their tokens, not even those in the tails of rounding."""

import msgspec
import numpy as np
import pytest

from zerodrift.audit.counterfactual.boundary import Gathered, parted_by
from zerodrift.audit.floor import measure_floor
from zerodrift.audit.measure import Observed, measure, tabulate
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift.gates import Gates, gates_for
from zerodrift.drift.split import off_tokens

SEEDS = 8
SAMPLING = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True)


def narrowed(gates: Gates, by: float) -> Gates:
    """So that the tails of rounding count as off."""
    return Gates(gates.mean * by, gates.p90 * by, gates.k3, gates.veto)


def requests(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    lengths = rng.permutation([*rng.integers(3, 40, 28), 70, 90, 120, 160])
    return [
        Request(
            Prompt(tuple(rng.integers(4, 500, length).tolist())),
            msgspec.structs.replace(SAMPLING, seed=100 * seed + number),
        )
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float32", Precision.FP32), pytest.param("bfloat16", Precision.BF16, marks=pytest.mark.long)],
    ids=["fp32", "bf16"],
)
def test_no_split_is_stated_of_a_healthy_engine(llama, dtype, precision):
    engine = ReferenceBackend("testbed:llama", dtype=dtype)
    stated, tails = [], 0
    for seed in range(SEEDS):
        asked = requests(seed)
        answers = zip(asked, engine.generate(asked), strict=True)
        observed = [
            Observed(each, request.sampling) for request, answer in answers for each in answer.completions
        ]
        measured = measure(llama.teacher, observed, llama.facts.eos_token_ids)
        passages = [item.passage for item in observed[:4]]
        floor = measure_floor(
            llama.model, passages, dtype, sampled_with=[item.requested for item in observed[:4]]
        )
        gates = gates_for(ValidationConfig().gate_for(precision), floor)
        # The narrower, the more tokens are off: at an eighth of its gate a healthy engine has tails.
        for by in (1.0, 0.5, 0.25, 0.125):
            near = narrowed(gates, by)
            tails += int(off_tokens(tabulate(measured, floor), near).sum())
            parted = parted_by(
                Gathered(measured, np.arange(len(measured))), floor, near, np.random.default_rng(seed)
            )
            stated += [] if parted is None else [parted]
    assert tails > 0
    assert not stated

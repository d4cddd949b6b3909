"""Every injector on one model: detected, and named as itself or as what cannot be told from it.

The model is Qwen3, or the first of the others that has what the fault needs (a sliding window, a BOS, a tied head).
With every change one injector of each name (`path/body-precision:bf16` and not `:fp16`), the others in the long
profile: 26 s of an audit each. `make faults-full` has all models, pairs, and trained weights.
"""

import pytest

from zerodrift.core.cause import Layer
from zerodrift.faults.fault import Need
from zerodrift.faults.registry import FAULTS

FIRST = {name.partition(":")[0]: name for name in reversed(FAULTS)}
"""The first injector of each name."""
SEEN = [name for name, fault in FAULTS.items() if Need.IN_FLIGHT not in fault.needs]
"""An audit updates an engine of which nobody asks anything; what acts on requests in flight is planted in trainings
(tests/unit/train/test_planted.py)."""
MODELS = ("testbed:qwen3", "testbed:mistral", "testbed:llama")


def test_every_layer_that_an_audit_can_see_is_among_them():
    seen = {Layer.SEMANTIC, Layer.PATH, Layer.WEIGHTS, Layer.TRAINER}
    assert {fault.kind for fault in FAULTS.values()} == seen


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST.values() else pytest.param(name, marks=pytest.mark.long) for name in SEEN],
)
def test_it_is_detected_and_named(matrix, tmp_path, name):
    row = None
    for model in MODELS:
        scratch = tmp_path / model.partition(":")[2]
        scratch.mkdir()
        row = row or matrix.run_faults([FAULTS[name]], model, scratch)
    assert row is not None, "no model has what it needs"
    assert row.verdict == "FAIL", row
    assert matrix.named(row), row

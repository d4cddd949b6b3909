"""Forty bugs that the auditor was not written for: all are seen, and none gets a name that is not its own.

Each ten was written by somebody who had not seen how causes are attributed, with its true names settled first, and was
scored once before anything was changed for it:

    blind.py    10 of 10 detected,  4 named truly or `unexplained`
    unseen.py    8 of 10 detected,  4 of those named truly or `unexplained`
    fresh.py    10 of 10 detected,  9 named truly or `unexplained`
    foreign.py  10 of 10 detected, 10 named truly or `unexplained`

What was changed after each of the first three is in LOG.md; after the fourth, nothing. None of them is blind any longer:
here they guard what was learnt.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.records.verdict import Outcome

MISSED = {
    "typical-acceptance": "p = 1e-5 at 3,000 tokens: the audit asks for more samples",
}
NAMES = {
    "blind": (
        "attention-base-two",
        "logit-soft-cap",
        "two-decimals",
        "padded-vocabulary",
        "dynamic-temperature",
        "draft-logprobs",
        "exponential-noise",
        "page-given-twice",
        "adapter-twice",
        "truncated-residual",
    ),
    "unseen": (
        "frozen-noise",
        "typical-acceptance",
        "watermark",
        "whole-characters",
        "output-through-text",
        "two-decimals",
        "heads-in-turn",
        "adapter-twice",
        "burst-end-lost",
        "short-chunks",
    ),
    "fresh": (
        "norm-in-blocks",
        "heads-dealt-in-turn",
        "replica-lost-a-page",
        "gap-before-output",
        "no-copy-on-write",
        "equal-noise-in-threads",
        "noise-of-the-pair",
        "eager-acceptance",
        "temperature-after-softmax",
        "spread-over-chunks",
    ),
    "foreign": (
        "gelu-for-silu",
        "second-shard-one-row-low",
        "graph-without-adapter",
        "tile-unmasked",
        "swapped-in-short",
        "unsorted-wrongly",
        "middle-dropped",
        "without-top-choices",
        "shard-normaliser",
        "sums-so-far",
    ),
}


Script = Callable[[str], ModuleType]


def the_ten(script: Script, ten: str) -> tuple[Any, ...]:
    return tuple(getattr(script(f"faults/{ten}"), ten.upper()))


@pytest.mark.parametrize("ten", NAMES)
def test_all_ten_are_scored(ten: str, script: Script) -> None:
    assert [fault.name for fault in the_ten(script, ten)] == list(NAMES[ten])


@pytest.mark.long
@pytest.mark.parametrize(("ten", "name"), [(ten, name) for ten, names in NAMES.items() for name in names])
def test_seen_and_not_misnamed(
    matrix: Any,
    reference: Callable[[str], ReferenceBackend],
    tmp_path: Path,
    script: Script,
    ten: str,
    name: str,
) -> None:
    (fault,) = [each for each in the_ten(script, ten) if each.name == name]
    engine = fault.plant(ReferenceBackend("testbed:qwen3", dtype="float32"))
    record = matrix.judge(engine, reference("testbed:qwen3"), tmp_path, matrix.MANY_SAMPLES)
    if name in MISSED:
        assert record.verdict is Outcome.INCONCLUSIVE
        return
    assert record.verdict is Outcome.FAIL
    principal = next(cause.cause for cause in record.causes if cause.gating)
    assert principal in {*fault.true_names, "unexplained"}

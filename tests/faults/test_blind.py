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
from zerodrift.core.cause import CAUSES
from zerodrift.records.verdict import Outcome

MISSED = {
    "typical-acceptance": "p = 1e-5 at 3,000 tokens: the audit asks for more samples",
}
TENS = ("blind", "unseen", "fresh", "foreign")


Script = Callable[[str], ModuleType]


def the_ten(script: Script, ten: str) -> tuple[Any, ...]:
    return tuple(getattr(script(f"faults/{ten}"), ten.upper()))


@pytest.mark.parametrize("ten", TENS)
def test_there_are_ten_and_their_true_names_are_causes(ten: str, script: Script) -> None:
    faults = the_ten(script, ten)
    assert len({fault.name for fault in faults}) == 10
    for fault in faults:
        assert fault.true_names <= CAUSES.keys()


@pytest.mark.long
@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("ten", TENS)
def test_seen_and_not_misnamed(
    matrix: Any,
    reference: Callable[[str], ReferenceBackend],
    tmp_path: Path,
    script: Script,
    ten: str,
    number: int,
) -> None:
    fault = the_ten(script, ten)[number]
    engine = fault.plant(ReferenceBackend("testbed:qwen3", dtype="float32"))
    record = matrix.judge(engine, reference("testbed:qwen3"), tmp_path, matrix.MANY_SAMPLES)
    if fault.name in MISSED:
        assert record.verdict is Outcome.INCONCLUSIVE
        return
    assert record.verdict is Outcome.FAIL
    principal = next(cause.cause for cause in record.causes if cause.gating)
    assert principal in {*fault.true_names, "unexplained"}

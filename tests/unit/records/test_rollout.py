from typing import Any

import msgspec
import pytest

from zerodrift.core.completion import Completion, FinishReason, LogprobKind, Problem
from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.rollout import Rollout

NOTHING = Completion(
    prompt_token_ids=(1,),
    token_ids=(),
    logprobs=(),
    kind=LogprobKind.RAW,
    sampling=SamplingParams(),
    finish_reason=FinishReason.ABORT,
    versions=(),
    fingerprint="",
)
PROBLEM = Problem("value/non-finite", "logprobs[0] is nan")
SHARED: dict[str, Any] = {"index": 0, "group": "parity", "request": Request(Prompt((1,)))}


@pytest.mark.parametrize("outcome", [{"completion": NOTHING}, {"problem": PROBLEM}])
def test_a_completion_or_a_problem(outcome):
    rollout = Rollout(**SHARED, **outcome)
    assert msgspec.json.decode(msgspec.json.encode(rollout), type=Rollout) == rollout


@pytest.mark.parametrize("outcome", [{}, {"completion": NOTHING, "problem": PROBLEM}])
def test_never_both_and_never_neither(outcome):
    with pytest.raises(InvalidValue):
        Rollout(**SHARED, **outcome)


@pytest.mark.parametrize(
    "change",
    [{"request": None}, {"completion": "text"}, {"problem": "torn"}, {"index": -1, "problem": PROBLEM}],
    ids=str,
)
def test_it_is_made_of_what_it_says(change):
    with pytest.raises(InvalidValue):
        Rollout(**{**SHARED, **change})

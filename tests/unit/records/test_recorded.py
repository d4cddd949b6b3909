import math
from typing import Any

import pytest

from zerodrift.core.errors import InvalidCompletion, InvalidSampling, InvalidValue, NonFinite
from zerodrift.core.request import SamplingParams
from zerodrift.records.recorded import RecordedRollout

GOOD: dict[str, Any] = {
    "source": "dump.jsonl",
    "line": 3,
    "step": 0,
    "prompt": (1, 2),
    "output": (3, 4),
    "logprobs": (-0.5, -1.0),
    "sampling": SamplingParams(),
}


def test_it_knows_where_it_came_from():
    assert RecordedRollout(**GOOD).where == "dump.jsonl, line 3"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"line": 0}, InvalidValue),
        ({"step": -1}, InvalidValue),
        ({"step": "seven"}, InvalidValue),
        ({"prompt": ()}, InvalidCompletion),
        ({"prompt": (1, -2)}, InvalidCompletion),
        ({"output": (3, 4.0)}, InvalidCompletion),
        ({"logprobs": (-0.5,)}, InvalidCompletion),
        ({"logprobs": (-0.5, math.nan)}, NonFinite),
        ({"logprobs": (-0.5, -9999.0)}, NonFinite),
        ({"logprobs": (-0.5, 0.3)}, InvalidCompletion),
        ({"logprobs": (-0.5, None)}, InvalidCompletion),
        ({"logprobs": [-0.5, -1.0]}, InvalidCompletion),
        ({"kind": "raw"}, InvalidCompletion),
        ({"sampling": {}}, InvalidCompletion),
        ({"finish_reason": "stop"}, InvalidCompletion),
        ({"trainer_logprobs": (-0.5,)}, InvalidCompletion),
        ({"trainer_logprobs": (-0.5, math.inf)}, NonFinite),
    ],
)
def test_what_no_engine_can_have_done_is_refused(change, error):
    with pytest.raises(error):
        RecordedRollout(**{**GOOD, **change})


def test_ids_must_be_those_of_the_model():
    rollout = RecordedRollout(**GOOD)
    rollout.check_vocabulary(5)
    with pytest.raises(InvalidCompletion):
        rollout.check_vocabulary(4)
    with pytest.raises(InvalidCompletion):
        rollout.check_vocabulary(2)
    biased = RecordedRollout(**{**GOOD, "sampling": SamplingParams(logit_bias={9: 1.0})})
    with pytest.raises(InvalidSampling):
        biased.check_vocabulary(5)

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


def test_it_knows_where_it_came_from() -> None:
    assert RecordedRollout(**GOOD).where == "dump.jsonl, line 3"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"line": 0}, InvalidValue, "lines count from 1"),
        ({"step": -1}, InvalidValue, "step is -1"),
        ({"step": "seven"}, InvalidValue, "step is 'seven'"),
        ({"prompt": ()}, InvalidCompletion, "the prompt is empty"),
        ({"prompt": (1, -2)}, InvalidCompletion, r"prompt ids\[1\] is -2"),
        ({"output": (3, 4.0)}, InvalidCompletion, r"output ids\[1\] is 4.0"),
        ({"logprobs": (-0.5,)}, InvalidCompletion, "2 output tokens carry 1 logprobs"),
        ({"logprobs": (-0.5, math.nan)}, NonFinite, r"logprobs\[1\] is nan"),
        ({"logprobs": (-0.5, -9999.0)}, NonFinite, r"logprobs\[1\] is -9999"),
        ({"logprobs": (-0.5, 0.3)}, InvalidCompletion, r"logprobs\[1\] is 0.3, which is no log-probability"),
        ({"logprobs": (-0.5, None)}, InvalidCompletion, r"logprobs\[1\] is None"),
        ({"logprobs": [-0.5, -1.0]}, InvalidCompletion, "logprobs is a list; give a tuple"),
        ({"kind": "raw"}, InvalidCompletion, "kind is 'raw'; give a .*LogprobKind"),
        ({"sampling": {}}, InvalidCompletion, "sampling is {}; give a SamplingParams"),
        ({"finish_reason": "stop"}, InvalidCompletion, "finish_reason is 'stop'; give a .*FinishReason"),
        ({"trainer_logprobs": (-0.5,)}, InvalidCompletion, "2 output tokens carry 1 trainer_logprobs"),
        ({"trainer_logprobs": (-0.5, math.inf)}, NonFinite, r"trainer_logprobs\[1\] is inf"),
    ],
)
def test_what_no_engine_can_have_done_is_refused(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        RecordedRollout(**{**GOOD, **change})


def test_ids_must_be_those_of_the_model() -> None:
    rollout = RecordedRollout(**GOOD)
    rollout.check_vocabulary(5)
    with pytest.raises(InvalidCompletion):
        rollout.check_vocabulary(4)
    with pytest.raises(InvalidCompletion):
        rollout.check_vocabulary(2)
    biased = RecordedRollout(**{**GOOD, "sampling": SamplingParams(logit_bias={9: 1.0})})
    with pytest.raises(InvalidSampling):
        biased.check_vocabulary(5)

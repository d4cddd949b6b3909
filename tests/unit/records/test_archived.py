import math
from typing import Any

import msgspec
import numpy as np
import pytest

from zerodrift.core.errors import DigestMismatch, InvalidCompletion, InvalidSampling, InvalidValue
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.records.archived import (
    ArchivedBatch,
    ArchivedRollout,
    BatchState,
    rollout_digest,
    version_spans,
)

FIELDS: dict[str, Any] = {
    "id": "a",
    "prompt_token_ids": (1, 2),
    "token_ids": (3, 4, 5),
    "behavior_logprobs": (-0.1, -0.2, -0.3),
}


def rollout(**changes: Any) -> ArchivedRollout:
    return ArchivedRollout(**{**FIELDS, **changes})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"id": ""}, InvalidValue),
        ({"id": 3}, InvalidValue),
        ({"prompt_token_ids": [1, 2]}, InvalidCompletion),
        ({"prompt_token_ids": (1, -2)}, InvalidCompletion),
        ({"token_ids": (3, 4, 2**31)}, InvalidCompletion),
        ({"token_ids": (3, 4, True)}, InvalidCompletion),
        ({"token_ids": (3, 4)}, InvalidCompletion),
        ({"behavior_logprobs": (-0.1, -0.2)}, InvalidCompletion),
        ({"behavior_logprobs": (-0.1, -0.2, None)}, InvalidCompletion),
        ({"behavior_logprobs": (-0.1, -0.2, np.float64(-1))}, InvalidCompletion),
        ({"behavior_logprobs": np.zeros(3)}, InvalidCompletion),
        ({"old_logprobs": (-0.1,) * 4}, InvalidCompletion),
        ({"current_logprobs": ()}, InvalidCompletion),
        ({"rescored_logprobs": (-0.1,)}, InvalidCompletion),
        ({"mask": (True, False)}, InvalidCompletion),
        ({"mask": (1, 0, 1)}, InvalidCompletion),
        ({"versions": version_spans([1, 1])}, InvalidCompletion),
        ({"versions": (VersionSpan(WeightVersion("1"), 1, 3),)}, InvalidCompletion),
        ({"reward": "1"}, InvalidValue),
        ({"environment": 3}, InvalidValue),
        ({"stated": ("warmth",)}, InvalidSampling),
        ({"sampling": {"temperature": 1}}, InvalidSampling),
        ({"digest": "0" * 32}, DigestMismatch),
    ],
)
def test_what_does_not_fit_is_refused(changes, error):
    with pytest.raises(error):
        rollout(**changes)


def test_numbers_that_are_evidence_are_kept():
    odd = rollout(behavior_logprobs=(math.nan, 3.5, -math.inf), reward=math.nan, token_ids=(3, 4, 5))
    assert odd.behavior_logprobs[1] == 3.5
    assert rollout(prompt_token_ids=(), token_ids=(), behavior_logprobs=()).version is None


def test_a_digest_is_of_prompt_tokens_and_logprobs_and_of_nothing_else():
    whole = rollout().digest
    assert rollout(digest=whole, reward=3, environment="e", old_logprobs=(-1.0,) * 3).digest == whole
    others = {
        rollout(prompt_token_ids=(1, 2, 3), token_ids=(4, 5), behavior_logprobs=(-0.1, -0.2)).digest,
        rollout(token_ids=(3, 5, 4)).digest,
        rollout(behavior_logprobs=(-0.1, -0.2, -0.30000001)).digest,
        rollout(prompt_token_ids=(2, 1)).digest,
    }
    assert len(others | {whole}) == 5


def test_every_nan_is_the_same_nan():
    other = float(np.array([0xFFF8000000000001], dtype=np.uint64).view(np.float64)[0])
    assert rollout_digest((1,), (2,), (math.nan,)) == rollout_digest((1,), (2,), (other,))


def test_a_digest_stays_what_it_is():
    """It stands in archives and beside rewards: one that changes is another format."""
    assert rollout().digest == "cff121b0a84202bce50b3fcc6f3dc601"


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": True},
        {"state": "quarantine"},
        {"reasons": ["k3"]},
        {"rollouts": ()},
        {"rollouts": (rollout(), rollout())},
        {"trainer_version": 3},
    ],
)
def test_a_batch_is_checked(changes):
    fields = {"step": 1, "state": BatchState.OK, "rollouts": (rollout(),), **changes}
    with pytest.raises(InvalidValue):
        ArchivedBatch(**fields)


def test_unknown_fields_are_refused():
    content = msgspec.to_builtins(ArchivedBatch(step=1, state=BatchState.OK, rollouts=(rollout(),)))
    assert msgspec.convert(content, ArchivedBatch).rollouts == (rollout(),)
    for place in (content, content["rollouts"][0]):
        place["weather"] = 1
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(content, ArchivedBatch)
        del place["weather"]


def test_spans_of_versions():
    spans = version_spans([4, 4, "5", 4])
    assert [(span.version.label, span.start, span.end) for span in spans] == [
        ("4", 0, 2),
        ("5", 2, 3),
        ("4", 3, 4),
    ]
    assert rollout(token_ids=(1, 2, 3, 4), behavior_logprobs=(-1.0,) * 4, versions=spans).version == "4+5"
    assert version_spans([]) == ()


def test_parameters_are_as_they_will_be_read():
    kept = rollout(sampling=SamplingParams(temperature=1), reward=1)
    assert type(kept.sampling.temperature) is type(kept.reward) is float


def test_whether_a_batch_is_kept_hangs_on_what_is_in_it():
    def key(step=1, state=BatchState.OK, **changes):
        return ArchivedBatch(step=step, state=state, rollouts=(rollout(**changes),)).content_key

    assert key() == key(state=BatchState.WARN)
    assert len({key(), key(step=2), key(id="b"), key(token_ids=(3, 4, 6))}) == 4

import pytest

from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion


@pytest.fixture
def fields():
    """What a sound completion of three tokens after a prompt of two is made of."""
    version = WeightVersion("step-1", "0123456789abcdef")
    return {
        "prompt_token_ids": (1, 2),
        "token_ids": (3, 4, 5),
        "logprobs": (-0.5, -1.5, 0.0),
        "kind": LogprobKind.PROCESSED,
        "sampling": SamplingParams(seed=7),
        "finish_reason": FinishReason.LENGTH,
        "versions": (VersionSpan(version, 0, 3),),
        "fingerprint": "feed",
        "lineage": (LineageSegment(version, 0, 4),),
    }


@pytest.fixture
def completion(fields):
    return Completion(**fields)

import pytest

from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.request import SamplingParams
from zerodrift.records.baseline import BaselineHeader
from zerodrift.records.verdict import Outcome, VerdictRecord


@pytest.fixture
def fingerprint():
    return EngineFingerprint(engine="reference", semantic={"a": "1"}, numeric={}, deployment={})


@pytest.fixture
def header(fingerprint):
    return BaselineHeader(
        model="testbed:llama",
        weights="aa",
        prompts="bb",
        count=2,
        sampling=SamplingParams(seed=0),
        reference=fingerprint,
    )


@pytest.fixture
def verdict(fingerprint):
    """What a verdict is made of."""
    return {
        "verdict": Outcome.PASS,
        "guilty": "none",
        "message": "The engine is the trainer's policy.",
        "engine": fingerprint,
        "reference": fingerprint,
        "model": "testbed:llama",
        "precision": "fp32",
        "floor": {"mean": 1e-7},
        "metrics": {"k3": 1e-9},
        "gates": {"k3": 1e-3},
    }


@pytest.fixture
def record(verdict):
    return VerdictRecord(**verdict)

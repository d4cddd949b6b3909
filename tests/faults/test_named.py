"""What counts as named, and healthy engines that must pass. Planted faults are in test_every_injector.py."""

import pytest

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.cause import CAUSES
from zerodrift.faults.prefix_cache import PrefixCachingReference
from zerodrift.faults.registry import FAULTS
from zerodrift.records.verdict import Outcome, VerdictRecord

SMALL = ValidationConfig(num_prompts=16, equivalence_trials=20, max_tokens=16)


@pytest.mark.parametrize(
    ("found", "listed", "named"),
    [
        (("path/rope",), (), True),
        (("path/window", "path/rope"), (), False),
        ((), ("path/rope",), False),
        ((), (), False),
        (("unexplained",), (), False),
    ],
)
def test_named_means_by_the_principal_cause(matrix, found, listed, named):
    row = matrix.Row(fault="path/rope:x", model="m", verdict="FAIL", found=found, listed=listed)
    assert matrix.named(row) is named


def test_of_two_faults_both_must_gate(matrix):
    planted = {"fault": "path/rope:x + semantic/bos:y", "model": "m", "verdict": "FAIL"}
    assert matrix.named(matrix.Row(**planted, found=("semantic/bos", "path/rope")))
    assert not matrix.named(matrix.Row(**planted, found=("path/rope",), listed=("semantic/bos",)))


def test_pairs_are_of_faults_that_exist(matrix):
    assert {name for pair in matrix.PAIRS for name in pair} <= set(FAULTS)
    assert len(set(map(frozenset, matrix.PAIRS))) == len(matrix.PAIRS)


def test_causes_that_cannot_be_told_apart_count_for_each_other(matrix):
    for group in matrix.EQUIVALENT:
        assert group <= set(CAUSES)
        for planted in group:
            for found in group:
                row = matrix.Row(fault=f"{planted}:x", model="m", verdict="FAIL", found=(found,))
                assert matrix.named(row)


# --- healthy ----------------------------------------------------------------------------------------------------


def statuses(record: VerdictRecord) -> dict[str, Outcome]:
    return {probe.name: probe.status for probe in record.probes}


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_healthy_engine_passes(matrix, reference, tmp_path, model):
    spec = f"testbed:{model}"
    record = matrix.judge(ReferenceBackend(spec, dtype="float32"), reference(spec), tmp_path, SMALL)
    assert record.verdict is Outcome.PASS, (record.message, record.causes)
    assert not any(cause.gating for cause in record.causes)
    assert record.metrics["mean"] < record.gates["mean"] / 2
    assert statuses(record)["repeat"] is Outcome.PASS


def test_a_healthy_engine_in_bf16_passes_in_its_own_profile(matrix, reference, tmp_path):
    """And fails in that of fp32: the gates are relative to a precision, and one that is not kept is a fault."""
    engine = ReferenceBackend("testbed:llama", dtype="bfloat16")
    own = matrix.judge(engine, reference("testbed:llama"), tmp_path, SMALL, precision=Precision.BF16)
    assert own.verdict is Outcome.PASS, (own.message, own.causes)
    assert own.floor["mean"] > 1e-3
    other = matrix.judge(engine, reference("testbed:llama"), tmp_path, SMALL)
    assert other.verdict is Outcome.FAIL
    assert other.causes[0].cause == "path/body-precision"


def test_a_sound_prefix_cache_passes_and_is_seen_to_be_hit(matrix, reference, tmp_path):
    engine = PrefixCachingReference(ReferenceBackend("testbed:qwen2", dtype="float32"))
    record = matrix.judge(engine, reference("testbed:qwen2"), tmp_path, SMALL)
    assert record.verdict is Outcome.PASS, (record.message, record.causes)
    (cache,) = [probe for probe in record.probes if probe.name == "cache"]
    assert cache.status is Outcome.PASS
    assert cache.evidence["cached_tokens"] > 1000

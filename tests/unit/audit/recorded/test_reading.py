from typing import Any

import pytest

from zerodrift.audit.probes.result import found
from zerodrift.audit.recorded.reading import dump_probe, fingerprint_of, parameters_probe, with_doubt
from zerodrift.core.completion import LogprobKind
from zerodrift.core.request import SHAPING, SamplingParams
from zerodrift.records.dump import BadLine, Dump
from zerodrift.records.dump_formats import DumpFormat
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import FoundBy, Outcome


def dump(rollouts: list[RecordedRollout], **fields: Any) -> Dump:
    return Dump(**{"format": DumpFormat.PLAIN, "rollouts": tuple(rollouts), "lines": len(rollouts), **fields})


def test_a_dump_that_was_judged_whole(rollout):
    record = dump_probe(dump([rollout()] * 3), [rollout()] * 3, "", "vllm").record
    assert (record.status, record.message) == (Outcome.PASS, "3 of 3 rollouts judged")


def test_repetitions_are_told(rollout):
    rare = {"logprobs": (-9.0, -9.0, -9.0)}
    rollouts = [rollout(line=1, **rare), rollout(line=2, **rare), rollout(line=3), rollout(line=4)]
    record = dump_probe(dump(rollouts), rollouts, "", "vllm").record
    assert record.message == (
        "4 of 4 rollouts judged; repetitions among them: 1 (copies, or samples that share a seed), which count once in "
        "the test of the samples"
    )
    assert record.evidence["repeated"] == 1


def test_what_was_left_out_is_said(rollout):
    rollouts = [rollout(version=str(number)) for number in range(3)]
    result = dump_probe(dump(rollouts, empty=("d, line 9",)), rollouts[:2], "to step 2", "vllm")
    assert result.record.message == (
        "2 of 3 rollouts judged (to step 2); 1 sampled nothing; they carry 2 weight versions, "
        "and one checkpoint cannot be all of them (--version)"
    )


def test_labels_of_one_checkpoint_are_no_contradiction(rollout):
    rollouts = [rollout(version=str(number)) for number in range(3)]
    told = dump_probe(dump(rollouts), rollouts, "", "vllm", labels_fit=True).record.message
    assert told == "3 of 3 rollouts judged"


@pytest.mark.parametrize(("lines", "required"), [(10, True), (1000, False)])
def test_skipped_lines_are_named_and_too_many_leave_nothing_to_judge(lines, required, rollout):
    bad = tuple(
        BadLine("d", line, "value/non-finite" if line == 4 else "record/invalid", f"reason {line}")
        for line in range(1, 24)
    )
    result = dump_probe(dump([rollout()], bad=bad, lines=lines), [rollout()], "", "vllm")
    assert result.record.status is Outcome.INCONCLUSIVE
    assert result.record.required is required
    assert f"23 of {lines} lines skipped: d, line 1 (reason 1); d, line 2 (reason 2)" in result.record.message
    assert result.record.message.endswith("; and 3 more")
    (cause,) = result.causes
    assert (cause.cause, cause.gating, cause.explained) == ("semantic/nonfinite", False, 1 / lines)
    assert cause.evidence == f"1 of {lines} lines, first d, line 4: reason 4"


def test_structural_damage_is_no_fault_of_the_engine(rollout):
    bad = (BadLine("d", 2, "record/invalid", "torn"),)
    assert dump_probe(dump([rollout()], bad=bad), [rollout()], "", "vllm").causes == ()


def test_parameters_that_nobody_stated(rollout):
    whole = rollout(stated=frozenset(SHAPING))
    assert parameters_probe([whole]).record.status is Outcome.PASS
    partly = rollout(stated=frozenset(SHAPING) - {"top_p"}, sampling=SamplingParams(top_p=0.9))
    record = parameters_probe([partly, whole]).record
    assert record.status is Outcome.INCONCLUSIVE
    assert not record.required
    assert record.message == "not stated: top_p (taken as off)"
    bare = rollout(stated=frozenset(SHAPING) - {"logit_bias", "min_tokens"})
    assert parameters_probe([bare]).record.message == "not stated: logit_bias, min_tokens (taken as off)"
    # Nine of them are one line.
    says = parameters_probe([rollout()]).record.message
    assert says == "not stated: temperature (taken as 1), top_p and 7 more (taken as off)"


def test_a_cause_that_the_dump_may_have_forgotten_to_mention(rollout):
    causes = [found(name, "vllm", FoundBy.VALUE, "why") for name in ("semantic/truncation-mass", "path/rope")]
    stated = with_doubt(causes, [rollout(stated=frozenset(SHAPING))])
    assert stated == tuple(causes)
    doubted = with_doubt(causes, [rollout(stated=frozenset(SHAPING) - {"top_k", "temperature"})])
    assert (
        doubted[0].evidence
        == "why; the dump does not state top_k: if this was requested, say so with --top-k"
    )
    assert doubted[1] == causes[1]


def test_the_engine_as_far_as_the_dump_knows_it(rollout):
    bare = fingerprint_of(dump([rollout()]), [rollout()], "vllm")
    assert (bare.engine, bare.semantic) == ("vllm", {})
    assert bare.deployment == {"recorded_as": "plain", "recorded_in": "d"}
    known = [rollout(kind=LogprobKind.RAW, model="m", version=str(number)) for number in range(10)]
    assert fingerprint_of(dump(known), known, "vllm").semantic == {
        "logprobs_mode": "raw_logprobs",
        "model": "m",
        "weights_label": "0, 1, 2, 3, 4, 5, 6, 7, …",
    }

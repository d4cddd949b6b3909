import pytest

from zerodrift.audit.attribute import Attribution, Channel, SelectedCause
from zerodrift.audit.explain import attributed, by_samples_alone
from zerodrift.audit.probes.result import answered
from zerodrift.core.cause import CAUSES
from zerodrift.records.evidence import GreedyEvidence, SamplingEvidence
from zerodrift.records.verdict import FoundBy, Outcome, Probe

RAW, ROPE, INT4 = "semantic/raw-logprobs", "path/rope", "path/weight-quantisation"


def finding(
    explained: float = 1.0, channel: Channel = Channel.REPORTED, name: str = RAW, sequences: int = 20
) -> SelectedCause:
    return SelectedCause(name, "raw ones", explained, (explained - 0.1, explained), sequences, 55.4, channel)


@pytest.mark.parametrize(
    ("findings", "to_floor", "causes"),
    [
        ((), True, []),
        ((), False, ["unexplained"]),
        ((finding(),), True, [RAW]),
        # An exact explanation reaches the floor or is not the cause; only schemes that engines differ in need not.
        ((finding(0.95),), False, ["unexplained", RAW]),
        ((finding(0.6, name=INT4),), False, [INT4]),
        ((finding(0.4, name=INT4),), False, ["unexplained", INT4]),
        ((finding(0.4), finding(0.9, name=INT4)), False, [RAW, INT4]),
        ((finding(0.4), finding(0.9, name=ROPE)), False, ["unexplained", RAW, ROPE]),
        ((finding(0.4),), True, [RAW]),
    ],
)
def test_what_findings_leave_standing_is_unexplained(findings, to_floor, causes):
    named = attributed(Attribution(findings, 12.3, to_floor), "vllm", "signed bias +1.00")
    assert [each.cause for each in named] == causes
    unnamed = causes[:1] == ["unexplained"]
    assert [each.gating for each in named] == [not unnamed or not number for number in range(len(causes))]
    if unnamed:
        assert "12.3 σ left" in named[0].evidence
        assert "signed bias +1.00" in named[0].evidence


@pytest.mark.parametrize(
    ("channel", "by", "words"),
    [
        (Channel.REPORTED, FoundBy.VALUE, "raw ones: 55 nats of evidence from what was reported"),
        (Channel.SAMPLED, FoundBy.VALUE, "raw ones: 55 nats of evidence from what was sampled"),
        (Channel.SIZE, FoundBy.SIZE, "raw ones: 55 nats of evidence"),
    ],
)
def test_a_finding_keeps_its_evidence(channel, by, words):
    (only,) = attributed(Attribution((finding(0.7, channel),), 0, True), "vllm", "")
    assert (only.found_by, only.evidence, only.explained) == (by, words, 0.7)
    assert only.interval == pytest.approx((0.6, 0.7))
    assert only.fix == CAUSES[RAW].fix("vllm")


@pytest.mark.parametrize(
    ("sequences", "doubt"),
    [
        (20, ""),
        (19, "; the share is of 19 sequences, too few for an interval"),
        (0, "; no sequence chosen by chance shows it, and the share is that of the worst"),
    ],
)
def test_a_share_says_why_it_has_no_interval(sequences, doubt):
    (only,) = attributed(Attribution((finding(sequences=sequences),), 0, True), "vllm", "")
    assert only.evidence == f"raw ones: 55 nats of evidence from what was reported{doubt}"


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (SamplingEvidence(z=9.0, p=1e-9, p_serial=0.5, tokens=400), "semantic/sampling-bias"),
        (SamplingEvidence(z=9.0, p=0.0, p_serial=1e-8, tokens=400), "semantic/seed"),
        (GreedyEvidence(tokens=400, not_likeliest=9), "semantic/sampling-bias"),
    ],
)
def test_samples_that_nothing_explains_are_named_by_what_they_show(evidence, cause):
    result = answered(Probe.SAMPLING, Outcome.FAIL, "off", evidence)
    (only,) = by_samples_alone(result, "vllm")
    assert (only.cause, only.found_by, only.gating) == (cause, "sampling", True)
    assert by_samples_alone(answered(Probe.SAMPLING, Outcome.PASS, "fine", evidence), "vllm") == ()

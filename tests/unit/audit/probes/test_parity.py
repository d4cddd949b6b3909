import numpy as np
import pytest

from zerodrift.audit.probes.parity import drawn_again, parity, samples
from zerodrift.audit.probes.result import ProbeResult, answered
from zerodrift.audit.recorded.told_precision import strictest
from zerodrift.drift import sampling
from zerodrift.drift.sampling import Sampling
from zerodrift.records.evidence import SamplingEvidence
from zerodrift.records.verdict import Outcome, Probe


@pytest.mark.parametrize(
    ("tested", "option", "told"),
    [
        (Sampling(Outcome.INCONCLUSIVE, "in doubt"), "--trials", "in doubt (--trials)"),
        (Sampling(Outcome.INCONCLUSIVE, "in doubt"), "", "in doubt"),
        (Sampling(Outcome.INCONCLUSIVE, "no draws", vacuous=True), "--trials", "no draws"),
        (Sampling(Outcome.PASS, "fine"), "--trials", "fine"),
    ],
    ids=["an audit", "a dump, which has no such option", "nothing to draw more of", "no doubt"],
)
def test_more_samples_are_asked_for_by_whoever_can(tested, option, told, table, monkeypatch):
    monkeypatch.setattr(sampling, "fidelity", lambda _: tested)
    assert samples(table([np.zeros(2)]), greedy=False, to_have_more=option).message == told


@pytest.mark.parametrize(("option", "asks"), [("--trials", True), ("", False)])
def test_too_few_tokens_say_what_asks_for_more(option, asks, table):
    judged = parity(table([np.zeros(2)]), strictest(), np.random.default_rng(0), to_have_more=option)
    assert judged.status is Outcome.INCONCLUSIVE
    assert judged.message.endswith("(--trials)") is asks


def drawn(outcome: Outcome, p: float) -> ProbeResult:
    evidence = SamplingEvidence(z=0.0, tokens=4000, p=p)
    return answered(
        Probe.SAMPLING, outcome, f"uneven{sampling.UNDECIDED} (--trials)", evidence, required=True
    )


@pytest.mark.parametrize(
    ("more", "settled"),
    [
        (drawn(Outcome.FAIL, 1e-9), Outcome.FAIL),
        (drawn(Outcome.PASS, 9e-3), Outcome.FAIL),
        (drawn(Outcome.PASS, 1.1e-2), Outcome.PASS),
        (drawn(Outcome.PASS, 1.0), Outcome.PASS),
    ],
)
def test_a_doubt_is_settled_by_samples_of_their_own(more, settled):
    judged = drawn_again(drawn(Outcome.INCONCLUSIVE, 3e-5), more)
    assert judged.status is settled
    assert judged.required
    assert "(--trials)" not in judged.message


def test_a_doubt_stays_where_no_more_can_be_drawn(table):
    doubtful = drawn(Outcome.INCONCLUSIVE, 3e-5)
    assert drawn_again(doubtful, samples(table([np.zeros(2)]), greedy=False)) == doubtful

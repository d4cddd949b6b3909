from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from zerodrift.audit.attribute import Attribution, Finding
from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged, vacuous
from zerodrift.audit.verdict import SIZE_ONLY, attributed, conclude, decided_by_update, reconcile
from zerodrift.core.cause import CAUSES
from zerodrift.records.verdict import CauseFound, Outcome

RAW, ROPE, REPEAT, BATCH, DECODE = (
    "semantic/raw-logprobs",
    "path/rope",
    "path/nondeterminism",
    "path/batch-variance",
    "path/prefill-decode",
)
INT4 = "path/weight-quantisation"


def cause(name: str, by: str = "attribution", **fields: Any) -> CauseFound:
    return found(name, "vllm", by, "evidence", **fields)


def passed(name: str, *, required: bool = True, causes: Sequence[CauseFound] = ()) -> ProbeResult:
    return answered(name, Outcome.PASS, "fine", required=required, causes=tuple(causes))


def failed(name: str, *causes: CauseFound) -> ProbeResult:
    return answered(name, Outcome.FAIL, f"{name} is off", required=True, causes=causes)


SOUND = [passed("contract"), passed("parity"), passed("sampling")]


# --- conclude ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "causes", "verdict", "guilty"),
    [
        (SOUND, [], Outcome.PASS, "none"),
        ([*SOUND, not_judged("cache", "no salt")], [], Outcome.PASS, "none"),
        ([*SOUND, vacuous("cache", "no hit")], [], Outcome.PASS, "none"),
        ([*SOUND, not_judged("repeat", "died", required=True)], [], Outcome.INCONCLUSIVE, "unknown"),
        ([*SOUND, vacuous("repeat", "nothing", required=True)], [], Outcome.INCONCLUSIVE, "unknown"),
        ([*SOUND[:2], vacuous("sampling", "points", required=True)], [], Outcome.INCONCLUSIVE, "unknown"),
        ([*SOUND[:1], failed("parity")], [], Outcome.FAIL, "engine"),
        ([*SOUND[:1], failed("parity")], [cause(RAW)], Outcome.FAIL, "engine"),
        # What is wrong is wrong, whatever else could not be judged.
        ([failed("parity"), not_judged("repeat", "died", required=True)], [], Outcome.FAIL, "engine"),
        ([*SOUND, passed("batch", causes=[cause(BATCH, gating=False)])], [], Outcome.PASS, "none"),
        ([*SOUND, failed("trainer", cause("trainer/packing", "trainer"))], [], Outcome.FAIL, "trainer"),
        # Without a name, and still the trainer's.
        ([*SOUND, failed("trainer", cause("unexplained", "trainer"))], [], Outcome.FAIL, "trainer"),
        ([*SOUND, failed("weight-sync", cause("unexplained", "weight-sync"))], [], Outcome.FAIL, "engine"),
        ([*SOUND, failed("rewards", cause("unexplained", "rewards"))], [], Outcome.FAIL, "engine"),
        ([*SOUND, vacuous("rewards", "all 0", required=True)], [], Outcome.INCONCLUSIVE, "unknown"),
    ],
)
def test_conclusions(
    results: list[ProbeResult], causes: list[CauseFound], verdict: Outcome, guilty: str
) -> None:
    conclusion = conclude(results, causes)
    assert (conclusion.verdict, conclusion.guilty) == (verdict, guilty)


REWARDS = failed("rewards", cause("unexplained", "rewards", explained=0.0))


@pytest.mark.parametrize(
    ("results", "causes", "names"),
    [
        # Alone, the difference is real and has no name.
        (SOUND, [], ["unexplained"]),
        # A cause of what the engine samples accounts for the rewards too, wherever it was found.
        ([failed("parity")], [cause(RAW)], [RAW]),
        ([failed("contract", cause("semantic/bos", "contract"))], [], ["semantic/bos"]),
        ([*SOUND, failed("batch", cause(BATCH, "batch", gating=True))], [], [BATCH]),
        ([failed("parity")], [cause("unexplained")], ["unexplained"]),
        # What is listed fails nothing, and accounts for nothing.
        ([*SOUND, passed("batch", causes=[cause(BATCH, gating=False)])], [], ["unexplained", BATCH]),
        # A trainer's fault, or one of an update that came later, is no account of them.
        (
            [*SOUND, failed("trainer", cause("trainer/packing", "trainer"))],
            [],
            ["trainer/packing", "unexplained"],
        ),
        (
            [*SOUND, failed("weight-sync", cause("weights/stale", "weight-sync"))],
            [],
            ["weights/stale", "unexplained"],
        ),
    ],
)
def test_rewards_are_evidence_where_a_cause_is_found(
    results: list[ProbeResult], causes: list[CauseFound], names: list[str]
) -> None:
    conclusion = conclude([*results, REWARDS], causes)
    assert conclusion.verdict is Outcome.FAIL
    assert [cause.cause for cause in conclusion.causes] == names
    assert conclusion.says == CAUSES[names[0]].says
    unnamed = [cause.found_by for cause in conclusion.causes if cause.cause == "unexplained"]
    assert unnamed in ([], ["attribution" if causes else "rewards"])


def test_the_engine_is_named_before_the_trainer() -> None:
    results = [failed("parity"), failed("trainer", cause("trainer/packing", "trainer"))]
    assert conclude(results, [cause(RAW)]).guilty == "engine"


def test_the_sentence_is_the_principal_causes() -> None:
    assert conclude([failed("parity")], [cause(RAW)]).says == CAUSES[RAW].says
    assert conclude([failed("parity")], []).says == "parity is off"
    says = conclude([*SOUND, not_judged("repeat", "the engine died", required=True)], []).says
    assert says == "repeat: the engine died"


def test_another_model_comes_before_what_it_does_to_the_contract() -> None:
    results = [failed("contract", cause("semantic/eos"))]
    found = conclude(results, [cause("weights/other-model")])
    assert [c.cause for c in found.causes] == ["weights/other-model", "semantic/eos"]
    assert found.says == CAUSES["weights/other-model"].says


def test_contract_causes_come_first_then_attribution_then_the_rest() -> None:
    results = [
        failed("batch", cause(BATCH, "batch", gating=True)),
        failed("contract", cause("semantic/bos", "contract")),
    ]
    assert [c.cause for c in conclude(results, [cause(RAW)]).causes] == ["semantic/bos", RAW, BATCH]


def test_gating_causes_come_before_listed_ones() -> None:
    listed = cause(BATCH, gating=False)
    assert [c.cause for c in conclude([], [listed, cause(RAW)]).causes] == [RAW, BATCH]


def test_a_cause_is_named_once_by_its_strongest_evidence() -> None:
    weak, strong = cause(RAW, explained=0.3), cause(RAW, "contract", explained=0.9)
    listed = cause(RAW, explained=1.0, gating=False)
    for order in ([weak, strong, listed], [listed, strong, weak]):
        assert conclude([], order).causes == (strong,)


# --- attributed -------------------------------------------------------------------------------------------------


def finding(
    explained: float = 1.0, channel: str = "reported", name: str = RAW, sequences: int = 20
) -> Finding:
    return Finding(name, "raw ones", explained, (explained - 0.1, explained), sequences, 55.4, channel)


@pytest.mark.parametrize(
    ("findings", "to_floor", "causes"),
    [
        ((), True, []),
        ((), False, ["unexplained"]),
        ((finding(),), True, [RAW]),
        # An exact account reaches the floor or is not the cause; only schemes that engines differ in need not.
        ((finding(0.95),), False, ["unexplained", RAW]),
        ((finding(0.6, name=INT4),), False, [INT4]),
        ((finding(0.4, name=INT4),), False, ["unexplained", INT4]),
        ((finding(0.4), finding(0.9, name=INT4)), False, [RAW, INT4]),
        ((finding(0.4), finding(0.9, name=ROPE)), False, ["unexplained", RAW, ROPE]),
        ((finding(0.4),), True, [RAW]),
    ],
)
def test_what_findings_leave_standing_is_unexplained(
    findings: tuple[Finding, ...], to_floor: bool, causes: list[str]
) -> None:
    named = attributed(Attribution(findings, 12.3, 0.1, to_floor), "vllm", "signed bias +1.00")
    assert [each.cause for each in named] == causes
    unnamed = causes[:1] == ["unexplained"]
    assert [each.gating for each in named] == [not unnamed or not number for number in range(len(causes))]
    if unnamed:
        assert "12.3 σ left" in named[0].evidence
        assert "signed bias +1.00" in named[0].evidence


@pytest.mark.parametrize(
    ("channel", "by", "words"),
    [
        ("reported", "attribution", "raw ones: 55 nats of evidence from what was reported"),
        ("sampled", "attribution", "raw ones: 55 nats of evidence from what was sampled"),
        ("size", SIZE_ONLY, "raw ones: 55 nats of evidence"),
    ],
)
def test_a_finding_keeps_its_evidence(channel: str, by: str, words: str) -> None:
    (only,) = attributed(Attribution((finding(0.7, channel),), 0, 0, True), "vllm", "")
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
def test_a_share_says_why_it_has_no_interval(sequences: int, doubt: str) -> None:
    (only,) = attributed(Attribution((finding(sequences=sequences),), 0, 0, True), "vllm", "")
    assert only.evidence == f"raw ones: 55 nats of evidence from what was reported{doubt}"


# --- reconcile --------------------------------------------------------------------------------------------------


GATE = 1e-3


def itself(name: str, cause_name: str, mean: float, **evidence: Any) -> ProbeResult:
    gating = mean > GATE
    own = found(cause_name, "vllm", name, "differs", gating=gating)
    status = Outcome.FAIL if gating else Outcome.PASS
    return answered(name, status, "differs", {"mean": mean, **evidence}, causes=(own,))


UNNAMED = cause("unexplained", explained=0.0)
BY_SIZE = cause("path/body-precision", SIZE_ONLY)


@pytest.mark.parametrize(
    ("causes", "result", "mean", "principal", "gates"),
    [
        # Nothing wrong in parity: a self-inconsistency above the gate stands by itself.
        ((), itself("batch", BATCH, 0.1), 0.0, None, True),
        ((), itself("batch", BATCH, 1e-6), 0.0, None, False),
        # Without a name the difference takes that of an inconsistency as large.
        ((UNNAMED,), itself("repeat", REPEAT, 0.1), 0.1, REPEAT, True),
        ((UNNAMED,), itself("repeat", REPEAT, 0.02), 0.1, "unexplained", False),
        # A batch is to blame where answers alone are right; decoding only for what has the size of rounding.
        ((UNNAMED,), itself("batch", BATCH, 0.1), 0.1, "unexplained", False),
        ((UNNAMED,), itself("batch", BATCH, 0.1, alone_is_right=True), 0.1, BATCH, True),
        (
            (UNNAMED,),
            itself("prefill-decode", DECODE, 0.1, prefill_is_right=True),
            0.1,
            "unexplained",
            False,
        ),
        # Named by size alone, it yields to what proves more: noise, or another way that is right.
        ((BY_SIZE,), itself("batch", BATCH, 0.1, alone_is_right=True), 0.1, BATCH, True),
        ((BY_SIZE,), itself("repeat", REPEAT, 0.1), 0.1, REPEAT, True),
        ((BY_SIZE,), itself("prefill-decode", DECODE, 0.1, prefill_is_right=True), 0.1, DECODE, True),
        (
            (BY_SIZE,),
            itself("prefill-decode", DECODE, 0.1, prefill_is_right=False),
            0.1,
            "path/body-precision",
            False,
        ),
        ((BY_SIZE,), itself("batch", BATCH, 0.1), 0.1, "path/body-precision", False),
        # A better name stands, and what is no larger is its consequence.
        ((cause(RAW),), itself("repeat", REPEAT, 0.1), 0.1, RAW, False),
        ((cause(RAW),), itself("repeat", REPEAT, 0.3), 0.1, RAW, False),
        # What is far larger is a fault of its own.
        ((cause(RAW),), itself("repeat", REPEAT, 0.4), 0.1, RAW, True),
    ],
)
def test_what_the_engine_says_of_itself_is_a_cause_or_a_consequence(
    causes: tuple[CauseFound, ...], result: ProbeResult, mean: float, principal: str | None, gates: bool
) -> None:
    named, (judged,) = reconcile(causes, [result], mean, GATE)
    assert (named[0].cause if named else None) == principal
    assert judged.causes[0].gating is gates
    assert judged.record.status is (Outcome.FAIL if gates else Outcome.PASS)


def test_a_cause_by_size_goes_when_a_better_one_comes() -> None:
    named, _ = reconcile((UNNAMED, BY_SIZE, cause(ROPE)), [itself("repeat", REPEAT, 0.1)], 0.1, GATE)
    assert [each.cause for each in named] == [REPEAT, ROPE]
    assert named[0].gating


def test_only_the_first_that_proves_more_names_the_difference() -> None:
    results = [itself("repeat", REPEAT, 0.1), itself("batch", BATCH, 0.1)]
    named, judged = reconcile((UNNAMED,), results, 0.1, GATE)
    assert [each.cause for each in named] == [REPEAT]
    assert [each.causes[0].gating for each in judged] == [True, False]


def test_an_engine_that_does_not_repeat_itself_proves_nothing_about_batches() -> None:
    """The repeated question differs, by too little to be the cause; so may the one in a batch."""
    results = [itself("repeat", REPEAT, 0.01), itself("batch", BATCH, 0.1, alone_is_right=True)]
    named, _ = reconcile((UNNAMED,), results, 0.1, GATE)
    assert [each.cause for each in named] == ["unexplained"]


@pytest.mark.parametrize("causes", [(), (UNNAMED,), (BY_SIZE,), (cause(RAW),)])
@pytest.mark.parametrize("mean", [0.0, 0.1])
def test_what_a_stream_does_is_neither(causes: tuple[CauseFound, ...], mean: float) -> None:
    """Lost tokens leave no number to compare, and the answers that parity compares came whole."""
    lost = itself("stream", "semantic/streaming", 0.1)
    lost = ProbeResult(msgspec.structs.replace(lost.record, evidence={"mean": mean}), lost.causes)
    assert reconcile(causes, [lost], 0.1, GATE) == (causes, [lost])


def test_probes_without_a_cause_stay_as_they_are() -> None:
    results = [passed("repeat"), not_judged("cache", "no salt"), vacuous("batch", "nothing")]
    assert reconcile((UNNAMED,), results, 0.1, GATE) == ((UNNAMED,), results)


def test_records_are_copied_not_changed() -> None:
    before = itself("batch", BATCH, 0.1)
    copy = msgspec.json.encode(before.record)
    reconcile((cause(RAW),), [before], 0.1, GATE)
    assert msgspec.json.encode(before.record) == copy


# --- an update decides ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causes", "update", "right", "named"),
    [
        ((UNNAMED,), passed("weight-sync"), True, "weights/stale"),
        # A path outlives the weights, so it was not the path.
        ((BY_SIZE,), passed("weight-sync"), True, "weights/stale"),
        ((cause(ROPE), cause(RAW, gating=False)), passed("weight-sync"), True, "weights/stale"),
        # Wrong all the same, with the right weights.
        ((UNNAMED,), passed("weight-sync"), False, "unexplained"),
        # The update itself went wrong, or could not be made: nothing is known of the weights before.
        ((UNNAMED,), failed("weight-sync"), True, "unexplained"),
        ((UNNAMED,), not_judged("weight-sync", "cannot"), True, "unexplained"),
        ((cause(RAW),), passed("weight-sync"), True, RAW),
        ((), passed("weight-sync"), True, None),
    ],
)
def test_what_goes_away_with_the_right_weights_was_the_weights(
    causes: tuple[CauseFound, ...], update: ProbeResult, right: bool, named: str | None
) -> None:
    found_now = decided_by_update(causes, [update], lambda: right, "vllm")
    assert (found_now[0].cause if found_now else None) == named


def test_the_engine_is_not_asked_again_where_nothing_hangs_on_it() -> None:
    def never() -> bool:
        raise AssertionError("asked")

    assert decided_by_update((), [passed("weight-sync")], never, "vllm") == ()

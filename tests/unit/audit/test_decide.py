from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from zerodrift.audit.decide import Circumstances, Decision, decide
from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged, vacuous
from zerodrift.core.cause import CAUSES
from zerodrift.records.evidence import AgreementEvidence, GapEvidence, LocatedEvidence, ReturnEvidence
from zerodrift.records.verdict import CauseFound, FoundBy, Outcome, Probe

RAW, ROPE, REPEAT, BATCH, DECODE = (
    "semantic/raw-logprobs",
    "path/rope",
    "path/nondeterminism",
    "path/batch-variance",
    "path/prefill-decode",
)
BODY, STREAM = "path/body-precision", "semantic/streaming"


def cause(name: str, by: Probe | FoundBy = FoundBy.VALUE, **fields: Any) -> CauseFound:
    return found(name, "vllm", by, "evidence", **fields)


def passed(name: Probe, *, required: bool = True, causes: Sequence[CauseFound] = ()) -> ProbeResult:
    return answered(name, Outcome.PASS, "fine", required=required, causes=tuple(causes))


def failed(name: Probe, *causes: CauseFound) -> ProbeResult:
    return answered(name, Outcome.FAIL, f"{name} is off", required=True, causes=causes)


def conclude(results: Sequence[ProbeResult], causes: Sequence[CauseFound]) -> Decision:
    return decide(results, causes, Circumstances(engine="vllm"))


SOUND = [passed(Probe.CONTRACT), passed(Probe.PARITY), passed(Probe.SAMPLING)]


# --- conclude ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "causes", "verdict", "guilty"),
    [
        (SOUND, [], Outcome.PASS, "none"),
        ([*SOUND, not_judged(Probe.CACHE, "no salt")], [], Outcome.PASS, "none"),
        ([*SOUND, vacuous(Probe.CACHE, "no hit")], [], Outcome.PASS, "none"),
        ([*SOUND, not_judged(Probe.REPEAT, "died", required=True)], [], Outcome.INCONCLUSIVE, "unknown"),
        ([*SOUND, vacuous(Probe.REPEAT, "nothing", required=True)], [], Outcome.INCONCLUSIVE, "unknown"),
        ([*SOUND[:2], vacuous(Probe.SAMPLING, "points", required=True)], [], Outcome.INCONCLUSIVE, "unknown"),
        ([*SOUND[:1], failed(Probe.PARITY)], [], Outcome.FAIL, "engine"),
        ([*SOUND[:1], failed(Probe.PARITY)], [cause(RAW)], Outcome.FAIL, "engine"),
        # What is wrong is wrong, whatever else could not be judged.
        ([failed(Probe.PARITY), not_judged(Probe.REPEAT, "died", required=True)], [], Outcome.FAIL, "engine"),
        ([*SOUND, passed(Probe.BATCH, causes=[cause(BATCH, gating=False)])], [], Outcome.PASS, "none"),
        (
            [*SOUND, failed(Probe.TRAINER, cause("trainer/packing", Probe.TRAINER))],
            [],
            Outcome.FAIL,
            "trainer",
        ),
        # Without a name, and still the trainer's.
        ([*SOUND, failed(Probe.TRAINER, cause("unexplained", Probe.TRAINER))], [], Outcome.FAIL, "trainer"),
        (
            [*SOUND, failed(Probe.WEIGHT_SYNC, cause("unexplained", Probe.WEIGHT_SYNC))],
            [],
            Outcome.FAIL,
            "engine",
        ),
        ([*SOUND, failed(Probe.REWARDS, cause("unexplained", Probe.REWARDS))], [], Outcome.FAIL, "engine"),
        ([*SOUND, vacuous(Probe.REWARDS, "all 0", required=True)], [], Outcome.INCONCLUSIVE, "unknown"),
    ],
)
def test_conclusions(results, causes, verdict, guilty):
    conclusion = conclude(results, causes)
    assert (conclusion.verdict, conclusion.guilty) == (verdict, guilty)


REWARDS = failed(Probe.REWARDS, cause("unexplained", Probe.REWARDS, explained=0.0))


@pytest.mark.parametrize(
    ("results", "causes", "names"),
    [
        # Alone, the difference is real and has no name.
        (SOUND, [], ["unexplained"]),
        # A cause of what the engine samples accounts for the rewards too, wherever it was found.
        ([failed(Probe.PARITY)], [cause(RAW)], [RAW]),
        ([failed(Probe.CONTRACT, cause("semantic/bos", Probe.CONTRACT))], [], ["semantic/bos"]),
        ([*SOUND, failed(Probe.STREAM, cause(STREAM, Probe.STREAM))], [], [STREAM]),
        ([failed(Probe.PARITY)], [cause("unexplained")], ["unexplained"]),
        # What is listed fails nothing, and accounts for nothing.
        ([*SOUND, passed(Probe.BATCH, causes=[cause(BATCH, gating=False)])], [], ["unexplained", BATCH]),
        # A trainer's fault, or one of an update that came later, is no account of them.
        (
            [*SOUND, failed(Probe.TRAINER, cause("trainer/packing", Probe.TRAINER))],
            [],
            ["trainer/packing", "unexplained"],
        ),
        (
            [*SOUND, failed(Probe.WEIGHT_SYNC, cause("weights/stale", Probe.WEIGHT_SYNC))],
            [],
            ["weights/stale", "unexplained"],
        ),
    ],
)
def test_rewards_are_evidence_where_a_cause_is_found(results, causes, names):
    conclusion = conclude([*results, REWARDS], causes)
    assert conclusion.verdict is Outcome.FAIL
    assert [cause.cause for cause in conclusion.causes] == names
    assert conclusion.message == CAUSES[names[0]].message
    unnamed = [cause.found_by for cause in conclusion.causes if cause.cause == "unexplained"]
    assert unnamed in ([], ["attribution" if causes else "rewards"])


def test_the_engine_is_named_before_the_trainer():
    results = [failed(Probe.PARITY), failed(Probe.TRAINER, cause("trainer/packing", Probe.TRAINER))]
    assert conclude(results, [cause(RAW)]).guilty == "engine"


def test_the_sentence_is_the_principal_causes():
    assert conclude([failed(Probe.PARITY)], [cause(RAW)]).message == CAUSES[RAW].message
    assert conclude([failed(Probe.PARITY)], []).message == "parity is off"
    says = conclude([*SOUND, not_judged(Probe.REPEAT, "the engine died", required=True)], []).message
    assert says == "repeat: the engine died"


def test_another_model_comes_before_what_it_does_to_the_contract():
    results = [failed(Probe.CONTRACT, cause("semantic/eos"))]
    found = conclude(results, [cause("weights/other-model")])
    assert [c.cause for c in found.causes] == ["weights/other-model", "semantic/eos"]
    assert found.message == CAUSES["weights/other-model"].message


def test_contract_causes_come_first_then_attribution_then_the_rest():
    results = [
        failed(Probe.STREAM, cause(STREAM, Probe.STREAM)),
        failed(Probe.CONTRACT, cause("semantic/bos", Probe.CONTRACT)),
    ]
    assert [c.cause for c in conclude(results, [cause(RAW)]).causes] == ["semantic/bos", RAW, STREAM]


def test_gating_causes_come_before_listed_ones():
    listed = cause(BATCH, gating=False)
    assert [c.cause for c in conclude([], [listed, cause(RAW)]).causes] == [RAW, BATCH]


def test_a_cause_is_named_once_by_its_strongest_evidence():
    weak, strong = cause(RAW, explained=0.3), cause(RAW, Probe.CONTRACT, explained=0.9)
    listed = cause(RAW, explained=1.0, gating=False)
    for order in ([weak, strong, listed], [listed, strong, weak]):
        assert conclude([], order).causes == (strong,)


# --- what the engine says of itself --------------------------------------------------------------------------------


GATE = 1e-3


def itself(name: Probe, cause_name: str, mean: float, **more: int) -> ProbeResult:
    gating = mean > GATE
    own = found(cause_name, "vllm", name, "differs", gating=gating)
    status = Outcome.FAIL if gating else Outcome.PASS
    evidence = AgreementEvidence(tokens=9, differing=9, mean=mean, max=mean)
    return answered(name, status, "differs", msgspec.structs.replace(evidence, **more), causes=(own,))


def about(mean: float = 0.1, right: bool = False) -> Circumstances:
    return Circumstances(mean=mean, gate=GATE, engine="vllm", right_again=lambda: right)


def names(decision: Decision) -> list[tuple[str, bool]]:
    return [(each.cause, each.gating) for each in decision.causes]


UNNAMED = cause("unexplained", explained=0.0)
BY_SIZE = cause(BODY, FoundBy.SIZE)
ALONE, PREFILL = {"alone_is_right": True}, {"prefill_is_right": True}
DECODED, REPORTED = {**PREFILL, "decoded_only": True}, {**PREFILL, "decoded_only": False}


@pytest.mark.parametrize(
    ("causes", "result", "mean", "principal", "gates"),
    [
        # Nothing wrong in parity: a self-inconsistency above the gate stands by itself.
        ((), itself(Probe.BATCH, BATCH, 0.1), 0.0, BATCH, True),
        ((), itself(Probe.BATCH, BATCH, 1e-6), 0.0, None, False),
        # Without a name the difference takes that of an inconsistency as large.
        ((UNNAMED,), itself(Probe.REPEAT, REPEAT, 0.1), 0.1, REPEAT, True),
        ((UNNAMED,), itself(Probe.REPEAT, REPEAT, 0.02), 0.1, "unexplained", False),
        # A batch is to blame where answers alone are right; decoding only for what has the size of rounding.
        ((UNNAMED,), itself(Probe.BATCH, BATCH, 0.1), 0.1, "unexplained", False),
        ((UNNAMED,), itself(Probe.BATCH, BATCH, 0.1, **ALONE), 0.1, BATCH, True),
        ((UNNAMED,), itself(Probe.PREFILL_DECODE, DECODE, 0.1, **PREFILL), 0.1, "unexplained", False),
        # But for tokens that a prefill computed: what spares those is decoding, and no report.
        ((UNNAMED,), itself(Probe.PREFILL_DECODE, DECODE, 0.1, **DECODED), 0.1, DECODE, True),
        ((UNNAMED,), itself(Probe.PREFILL_DECODE, DECODE, 0.02, **DECODED), 0.1, "unexplained", False),
        ((cause(RAW),), itself(Probe.PREFILL_DECODE, DECODE, 0.1, **DECODED), 0.1, RAW, False),
        # What first tokens show too is Δ once more, however large it is beside scores.
        ((UNNAMED,), itself(Probe.PREFILL_DECODE, DECODE, 0.9, **REPORTED), 0.1, "unexplained", False),
        ((UNNAMED,), itself(Probe.PREFILL_DECODE, DECODE, 0.9), 0.1, "unexplained", True),
        ((), itself(Probe.PREFILL_DECODE, DECODE, 0.9, **REPORTED), 0.0, DECODE, True),
        # Named by size alone, it yields to what proves more: noise, or another way that is right.
        ((BY_SIZE,), itself(Probe.BATCH, BATCH, 0.1, **ALONE), 0.1, BATCH, True),
        ((BY_SIZE,), itself(Probe.REPEAT, REPEAT, 0.1), 0.1, REPEAT, True),
        ((BY_SIZE,), itself(Probe.PREFILL_DECODE, DECODE, 0.1, **PREFILL), 0.1, DECODE, True),
        ((BY_SIZE,), itself(Probe.PREFILL_DECODE, DECODE, 0.1, prefill_is_right=False), 0.1, BODY, False),
        ((BY_SIZE,), itself(Probe.BATCH, BATCH, 0.1), 0.1, BODY, False),
        # A better name stands, and what is no larger is its consequence; what is far larger is a fault of its own.
        ((cause(RAW),), itself(Probe.REPEAT, REPEAT, 0.1), 0.1, RAW, False),
        ((cause(RAW),), itself(Probe.REPEAT, REPEAT, 0.3), 0.1, RAW, False),
        ((cause(RAW),), itself(Probe.REPEAT, REPEAT, 0.4), 0.1, RAW, True),
    ],
)
def test_what_the_engine_says_of_itself_is_a_cause_or_a_consequence(causes, result, mean, principal, gates):
    before = msgspec.json.encode(result.record)
    decision = decide([result], causes, about(mean))
    assert (decision.principal.cause if decision.principal else None) == principal
    (judged,) = decision.results
    assert judged.causes[0].gating is gates
    assert judged.status is (Outcome.FAIL if gates else Outcome.PASS)
    assert msgspec.json.encode(result.record) == before


@pytest.mark.parametrize(
    ("causes", "results", "named"),
    [
        # A cause by size goes when a better one comes.
        (
            (UNNAMED, BY_SIZE, cause(ROPE)),
            [itself(Probe.REPEAT, REPEAT, 0.1)],
            [(REPEAT, True), (ROPE, True)],
        ),
        # Only the first that proves more names the difference.
        (
            (UNNAMED,),
            [itself(Probe.REPEAT, REPEAT, 0.1), itself(Probe.BATCH, BATCH, 0.1)],
            [(REPEAT, True), (BATCH, False)],
        ),
        # The repeated question differs, by too little to be the cause; so may the one in a batch.
        (
            (UNNAMED,),
            [itself(Probe.REPEAT, REPEAT, 0.01), itself(Probe.BATCH, BATCH, 0.1, **ALONE)],
            [("unexplained", True), (REPEAT, False), (BATCH, False)],
        ),
        # Probes without a cause stay as they are.
        (
            (UNNAMED,),
            [passed(Probe.REPEAT), not_judged(Probe.CACHE, "no salt"), vacuous(Probe.BATCH, "nothing")],
            [("unexplained", True)],
        ),
    ],
)
def test_causes_of_several(causes, results, named):
    assert names(decide(results, causes, about())) == named


@pytest.mark.parametrize("causes", [(), (UNNAMED,), (BY_SIZE,), (cause(RAW),)])
def test_what_a_stream_does_is_neither(causes):
    """The answers that parity compares came whole."""
    lost = itself(Probe.STREAM, "semantic/streaming", 0.1)
    decision = decide([lost], causes, about())
    assert decision.results == (lost,)
    assert set(names(decision)) == {*((each.cause, True) for each in causes), ("semantic/streaming", True)}


def test_what_was_not_asked_is_not_passed():
    assert decide((), (), Circumstances()).verdict is Outcome.INCONCLUSIVE
    everything = Circumstances(required=tuple(each.probe for each in SOUND))
    assert decide(SOUND, (), everything).verdict is Outcome.PASS
    for missing in SOUND:
        decision = decide([each for each in SOUND if each is not missing], (), everything)
        assert (decision.verdict, decision.guilty) == (Outcome.INCONCLUSIVE, "unknown")
        assert decision.message.startswith(f"{missing.probe}: ")
    # What is wrong is wrong, whatever was not asked.
    assert decide([failed(Probe.PARITY)], (), everything).verdict is Outcome.FAIL


# --- an update, and what nobody stated, decide ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causes", "update", "right", "named"),
    [
        ((UNNAMED,), passed(Probe.WEIGHT_SYNC), True, "weights/stale"),
        # A path outlives the weights, so it was not the path.
        ((BY_SIZE,), passed(Probe.WEIGHT_SYNC), True, "weights/stale"),
        ((cause(ROPE), cause(RAW, gating=False)), passed(Probe.WEIGHT_SYNC), True, "weights/stale"),
        # Wrong all the same, with the right weights.
        ((UNNAMED,), passed(Probe.WEIGHT_SYNC), False, "unexplained"),
        # The update itself went wrong, or could not be made: nothing is known of the weights before.
        ((UNNAMED,), failed(Probe.WEIGHT_SYNC), True, "unexplained"),
        ((UNNAMED,), not_judged(Probe.WEIGHT_SYNC, "cannot"), True, "unexplained"),
        ((cause(RAW),), passed(Probe.WEIGHT_SYNC), True, RAW),
        ((), passed(Probe.WEIGHT_SYNC), True, None),
    ],
)
def test_what_goes_away_with_the_right_weights_was_the_weights(causes, update, right, named):
    principal = decide([update], causes, about(right=right)).principal
    assert (principal.cause if principal else None) == named


def test_the_engine_is_not_asked_again_where_nothing_hangs_on_it():
    def never():
        raise AssertionError("asked")

    decide([passed(Probe.WEIGHT_SYNC)], (), about()._replace(right_again=never))


def test_what_nobody_stated_fails_nothing():
    unstated = about()._replace(unstated=("temperature", "top_p"))
    decision = decide([failed(Probe.PARITY)], [cause("semantic/temperature")], unstated)
    assert (decision.verdict, decision.guilty) == (Outcome.INCONCLUSIVE, "unknown")
    assert (decision.unstated, names(decision)) == (("temperature",), [("semantic/temperature", False)])
    assert decide([failed(Probe.PARITY)], [cause(ROPE)], unstated).verdict is Outcome.FAIL


def test_an_odd_reference_blames_nobody_and_keeps_the_causes():
    decision = decide([failed(Probe.PARITY)], [cause(ROPE)], about()._replace(odd_reference=True))
    assert (decision.verdict, decision.guilty, names(decision)) == (
        Outcome.INCONCLUSIVE,
        "unknown",
        [(ROPE, True)],
    )


# --- predictions ------------------------------------------------------------------------------------------------

TEMPERATURE, OTHER = "semantic/temperature", "weights/other-model"


def given(status: Outcome, mean: float) -> ProbeResult:
    return answered(Probe.GIVEN_TOKENS, status, "scores", GapEvidence(tokens=100, mean=mean, max=mean))


@pytest.mark.parametrize(
    ("causes", "result", "principal"),
    [
        # Prompt scores carry no temperature: logits that are scaled inside the model are none.
        ((cause(TEMPERATURE),), given(Outcome.FAIL, 0.1), "unexplained"),
        ((cause(TEMPERATURE),), given(Outcome.PASS, 1e-6), TEMPERATURE),
        # A much smaller difference is another one, and a name beside it may account for it.
        ((cause(TEMPERATURE),), given(Outcome.FAIL, 0.02), TEMPERATURE),
        ((cause(TEMPERATURE), cause(ROPE)), given(Outcome.FAIL, 0.1), TEMPERATURE),
        ((cause(TEMPERATURE), cause("semantic/penalty")), given(Outcome.FAIL, 0.1), "unexplained"),
        # Other weights cannot score rightly what they did not sample.
        ((cause(OTHER),), given(Outcome.PASS, 1e-6), "unexplained"),
        ((cause(OTHER),), given(Outcome.PASS, 0.02), OTHER),
        ((cause(OTHER),), given(Outcome.FAIL, 0.1), OTHER),
        ((cause(ROPE),), given(Outcome.FAIL, 0.1), ROPE),
        # A body that scores rightly is not rounded.
        ((BY_SIZE,), given(Outcome.PASS, 1e-6), "unexplained"),
        ((BY_SIZE,), given(Outcome.PASS, 0.05), BODY),
    ],
)
def test_a_name_whose_prediction_fails_is_taken_away(causes, result, principal):
    decision = decide([failed(Probe.PARITY), result], causes, about(0.1))
    assert decision.verdict is Outcome.FAIL
    assert decision.principal is not None
    assert decision.principal.cause == principal
    if principal == "unexplained":
        listed = {each.cause for each in decision.causes if not each.gating}
        assert listed == {each.cause for each in causes}
        assert all(name in decision.principal.evidence for name in listed)


def test_a_batch_takes_the_name_of_what_it_refutes():
    alone_is_right = itself(Probe.BATCH, BATCH, 0.1, **ALONE)
    decision = decide([failed(Probe.PARITY), alone_is_right], (cause(TEMPERATURE),), about(0.1))
    assert decision.principal is not None
    assert decision.principal.cause == BATCH


def test_a_name_by_size_yields_to_company_before_it_is_refuted():
    in_company = itself(Probe.BATCH, BATCH, 0.4, alone_is_right=True, changed=0)
    results = [
        failed(Probe.PARITY),
        in_company,
        given(Outcome.PASS, 1e-6),
        came_again(0, 0, rest=False, came=4),
    ]
    decision = decide(results, (BY_SIZE,), about(0.1))
    assert [each.cause for each in decision.causes if each.gating] == [BATCH]


def test_scores_that_mean_something_else_are_no_path():
    meant = msgspec.structs.replace(
        given(Outcome.FAIL, 0.8), causes=(cause("semantic/off-by-one", Probe.GIVEN_TOKENS),)
    )
    apart = itself(Probe.PREFILL_DECODE, DECODE, 1.5, prefill_is_right=False, decoded_only=False)
    decision = decide([*SOUND, apart, meant], (), about(1e-6))
    assert names(decision) == [("semantic/off-by-one", True), (DECODE, False)]
    # The sentence is about these numbers, and not about those of sampled tokens.
    assert decision.message != CAUSES["semantic/off-by-one"].message
    # Decoding is off by the same: it is the model, or all numbers.
    decision = decide([failed(Probe.PARITY), meant], (UNNAMED,), about(0.8))
    assert names(decision) == [("unexplained", True)]
    # Off by something else, it is a second fault, and refutes no name of the first.
    decision = decide([failed(Probe.PARITY), meant], (cause(TEMPERATURE),), about(0.8))
    assert names(decision) == [(TEMPERATURE, True), ("semantic/off-by-one", True)]


def test_noise_that_falls_on_a_comparison_refutes_nothing():
    noise = itself(Probe.BATCH, REPEAT, 0.1)
    decision = decide([failed(Probe.PARITY), noise], (cause(TEMPERATURE),), about(0.1))
    assert decision.principal is not None
    assert decision.principal.cause == TEMPERATURE


def test_a_fail_has_a_line_whoever_found_it():
    decision = decide([*SOUND, given(Outcome.FAIL, 0.1)], (), about(0.0))
    assert decision.verdict is Outcome.FAIL
    assert [(each.cause, each.found_by) for each in decision.causes] == [("unexplained", Probe.GIVEN_TOKENS)]
    assert decision.message == "scores"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, True),
        ({"logprobs_mode": "raw_logprobs"}, True),
        ({"logprobs_mode": "processed_logprobs"}, False),
    ],
)
def test_a_fix_that_is_in_force_is_not_told(settings, told):
    circumstances = about(0.1)._replace(settings=settings)
    (line,) = decide([failed(Probe.PARITY)], (cause(RAW),), circumstances).causes
    assert (line.fix == CAUSES[RAW].fix("vllm")) is told


# --- what comes and goes ----------------------------------------------------------------------------------------


def came_again(asked: int, gone: int, *, rest: bool, came: int = 0, mean: float = 0.01) -> ProbeResult:
    evidence = ReturnEvidence(
        tokens=9,
        differing=1,
        mean=mean,
        max=1.0,
        outliers=asked,
        outlier_requests=asked,
        requests=100,
        asked_again=asked,
        gone=gone,
        came=came,
        rest_is_right=rest,
    )
    causes = (cause(REPEAT, Probe.RETURN, gating=True),) if evidence.comes_and_goes else ()
    status = Outcome.FAIL if causes else Outcome.PASS
    return answered(Probe.RETURN, status, "again", evidence, causes=causes)


@pytest.mark.parametrize(
    ("causes", "result", "gating"),
    [
        ((), came_again(6, 5, rest=True), [REPEAT]),
        ((cause("unexplained"),), came_again(6, 5, rest=True), [REPEAT]),
        # A name that is always there would have been there again.
        ((cause("semantic/wrong-token"),), came_again(6, 5, rest=True), [REPEAT]),
        ((cause("semantic/wrong-token"),), came_again(6, 2, rest=True), ["semantic/wrong-token"]),
        # Beside a fault that stays it is a second one.
        ((cause(RAW),), came_again(6, 6, rest=False), [RAW, REPEAT]),
        ((), came_again(0, 0, rest=True, came=3), [REPEAT]),
        # Noise everywhere: no token stands out, and it is still the name.
        ((cause("unexplained"),), came_again(0, 0, rest=False, came=32, mean=0.1), [REPEAT]),
    ],
)
def test_what_comes_and_goes_takes_the_name_of_what_went(causes, result, gating):
    by_cache = itself(Probe.CACHE, "path/prefix-cache", 0.02)
    decision = decide([failed(Probe.PARITY), by_cache, result], causes, about(0.1))
    assert decision.verdict is Outcome.FAIL
    kept = [each.cause for each in decision.causes if each.gating and each.cause != "path/prefix-cache"]
    assert kept == gating


# --- located ----------------------------------------------------------------------------------------------------


HEAD = LocatedEvidence(
    layer=0,
    part="attention head",
    index=3,
    quantity="output",
    estimate=0.99,
    low=0.98,
    high=1.0,
    neutral=1.0,
    r2=1.0,
)


@pytest.mark.parametrize(("located", "principal"), [((HEAD,), "unexplained"), ((), BATCH)])
def test_what_is_located_keeps_its_place(located, principal):
    """In company it differs by as much, and is right alone: that names what has no place, and no more."""
    unnamed = msgspec.structs.replace(cause("unexplained"), located=located)
    evidence = AgreementEvidence(tokens=48, differing=48, mean=0.02, max=0.1, alone_is_right=True)
    crowd = answered(Probe.BATCH, Outcome.FAIL, "off", evidence, causes=(cause(BATCH, Probe.BATCH),))
    decision = decide(
        [*SOUND[:1], failed(Probe.PARITY), SOUND[2], crowd], [unnamed], Circumstances(mean=0.02, gate=1e-5)
    )
    assert decision.principal is not None
    assert decision.principal.cause == principal
    assert decision.principal.located == located

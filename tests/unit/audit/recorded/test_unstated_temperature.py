"""Raw logprobs: where nobody stated the temperature they are right at 1, and samples and trainer are not; and of one replica."""

import msgspec
import pytest

from zerodrift.audit.blame import Blamed
from zerodrift.audit.measure import measure
from zerodrift.audit.perturb import perturbed
from zerodrift.audit.recorded.timeline import observer
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import Outcome

Rollouts = list[RecordedRollout]
replace = msgspec.structs.replace
DRAWN_AT = 0.7


@pytest.fixture(scope="module")
def raw(engine) -> Rollouts:
    """Drawn at 0.7; the engine's numbers are raw, and the trainer's are right. Of the parameters none is stated."""
    requests = [
        Request(
            Prompt((0, 5 + number, 40, 7)),
            SamplingParams(max_tokens=20, seed=number, ignore_eos=True, temperature=DRAWN_AT),
        )
        for number in range(48)
    ]
    answers = [answer.completions[0] for answer in engine.generate(requests)]
    scores = engine.score([answer.sequence for answer in answers])
    return [
        RecordedRollout(
            source="d",
            line=number + 1,
            step=number // 8,
            prompt=answer.prompt_token_ids,
            output=answer.token_ids,
            logprobs=tuple(score[len(answer.prompt_token_ids) - 1 :]),
            trainer_logprobs=answer.logprobs,
            sampling=SamplingParams(),
            stated=frozenset(),
        )
        for number, (answer, score) in enumerate(zip(answers, scores, strict=True))
    ]


def without_trainer(rollouts: Rollouts) -> Rollouts:
    return [replace(each, trainer_logprobs=None) for each in rollouts]


def stated(rollouts: Rollouts, temperature: float) -> Rollouts:
    """The same lines, as they are read where somebody says the temperature."""
    return [
        replace(each, sampling=SamplingParams(temperature=temperature), stated=frozenset({"temperature"}))
        for each in rollouts
    ]


def evidence(blamed: Blamed) -> str:
    return " ".join(cause.evidence for cause in blamed.record.causes)


@pytest.mark.parametrize("trainer", [True, False], ids=["with trainer", "engine alone"])
def test_nobody_is_blamed_and_the_temperature_is_asked_for(trainer, raw, reference, judged):
    rollouts = raw if trainer else without_trainer(raw)
    blamed = judged(rollouts, reference, reproduce="zerodrift blame d")
    assert (blamed.record.verdict, blamed.record.guilty) == (Outcome.INCONCLUSIVE, "unknown")
    assert [each.command for each in blamed.to_type] == ["zerodrift blame d --temperature 0.7"]
    who = "The samples and the trainer's numbers have" if trainer else "The samples have about"
    assert blamed.record.message.startswith(f"{who} temperature 0.7, the engine's numbers are those of")
    assert "--temperature" in evidence(blamed)
    assert "--top-p" not in evidence(blamed), "what explains the samples is known"
    assert blamed.since == "nothing to date"


@pytest.mark.parametrize(
    ("temperature", "guilty", "cause"),
    [(DRAWN_AT, "engine", "semantic/raw-logprobs"), (1.0, "sampler", "semantic/sampling-bias")],
)
def test_once_it_is_stated_a_side_is_told(temperature, guilty, cause, raw, reference, judged):
    blamed = judged(stated(without_trainer(raw), temperature), reference)
    assert (blamed.record.verdict, blamed.record.guilty) == (Outcome.FAIL, guilty)
    assert [each.cause for each in blamed.record.causes] == [cause]
    assert "does not state" not in evidence(blamed), "a temperature explains it, and it is stated"


def at(temperature: float, rollouts: Rollouts, reference: ReferenceBackend) -> list[tuple[float, ...]]:
    """What a trainer has for the same tokens, where it divides logits by `temperature`."""
    observed = [observer(())(each) for each in stated(rollouts, temperature)]
    return [tuple(item.contracted.tolist()) for item in measure(reference.teacher, observed, ())]


def test_a_trainer_alone_is_blamed_where_samples_and_engine_agree(engine, reference, judged, sampled):
    """The control: engine and samples have temperature 1, and nothing but the trainer's numbers has another."""
    healthy = [
        replace(each, stated=frozenset()) for each in sampled(engine, [(0, 5 + n, 40, 7) for n in range(48)])
    ]
    wrong = [
        replace(each, trainer_logprobs=numbers)
        for each, numbers in zip(healthy, at(DRAWN_AT, healthy, reference), strict=True)
    ]
    blamed = judged(wrong, reference, reproduce="zerodrift blame d")
    assert (blamed.record.verdict, blamed.record.guilty) == (Outcome.FAIL, "trainer")
    assert not blamed.to_type


def of_one_replica(raw: Rollouts) -> Rollouts:
    """Every second rollout is raw; of the others the engine has what the trainer has."""
    return [
        each if number % 2 else replace(each, logprobs=each.trainer_logprobs)
        for number, each in enumerate(stated(raw, DRAWN_AT))
    ]


def test_what_some_rollouts_have_is_named_by_those(raw, reference, judged):
    blamed = judged(of_one_replica(raw), reference)
    assert (blamed.record.verdict, blamed.record.guilty) == (Outcome.FAIL, "engine")
    (cause,) = blamed.record.causes
    assert (cause.cause, cause.gating) == ("semantic/raw-logprobs", True)
    assert cause.evidence.startswith("in 24 of 48 rollouts, beside 24 that are the checkpoint's: ")
    assert cause.explained > 0.99
    assert blamed.since == (
        "bad from the first recorded step (0) on: 24 of 48 rollouts leave the checkpoint's numbers"
    )


@pytest.mark.long
def test_weights_of_some_rollouts_take_no_such_name(raw, reference, judged):
    """The control: nothing that a number means explains other weights, of however many rollouts."""
    other = Teacher(perturbed(reference.model, 1).new, layout=Layout.PADDED)
    rollouts = of_one_replica(raw)
    observed = [observer(())(each) for each in rollouts]
    numbers = [tuple(item.contracted.tolist()) for item in measure(other, observed, ())]
    mixed = [replace(each, logprobs=numbers[at]) if at % 2 else each for at, each in enumerate(rollouts)]
    blamed = judged(mixed, reference)
    assert [cause.cause for cause in blamed.record.causes if cause.gating] == ["unexplained"]

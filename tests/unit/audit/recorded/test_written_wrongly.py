"""Rollouts that are sound and were written down in another way: each way has its name, and sound ones have none."""

from collections.abc import Callable
from math import exp, log
from typing import Any

import msgspec
import pytest

from zerodrift.audit.blame import Blamed
from zerodrift.audit.perturb import perturbed
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import Outcome

STEPS, EACH, TOKENS = 4, 6, 16
PAD = 3
Rollouts = list[RecordedRollout]
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def sound(engine, sampled):
    return sampled(engine, [(0, 5 + number, 40, 7) for number in range(STEPS * EACH)])


def numbers(change: Callable[[float], float], **fields: Any) -> Callable[[Rollouts], Rollouts]:
    return lambda rollouts: [
        replace(each, logprobs=tuple(map(change, each.logprobs)), **fields) for each in rollouts
    ]


def of_the_next(rollouts: Rollouts) -> Rollouts:
    """Within a step, each has the numbers of the one behind it, cut or filled up to its own length."""
    told = []
    for number, each in enumerate(rollouts):
        first = number - number % EACH
        other = rollouts[first + (number - first + 1) % EACH].logprobs
        told.append(replace(each, logprobs=(*other, *[-1.0] * TOKENS)[: len(each.output)]))
    return told


def one_late(rollouts: Rollouts) -> Rollouts:
    return [replace(each, logprobs=(0.0, *each.logprobs[:-1])) for each in rollouts]


def moved(rollouts: Rollouts) -> Rollouts:
    """Tokens were padded on the right and numbers on the left; the padding was then cut from the tokens alone."""
    longest = max(len(each.output) for each in rollouts) + 1
    return [
        replace(each, logprobs=((0.0,) * (longest - len(each.output)) + each.logprobs)[: len(each.output)])
        for each in rollouts
    ]


def left_padded(rollouts: Rollouts) -> Rollouts:
    return [
        replace(each, prompt=(PAD,) * (2 + number % 3) + each.prompt) for number, each in enumerate(rollouts)
    ]


def right_padded(rollouts: Rollouts) -> Rollouts:
    return [
        replace(each, prompt=each.prompt + (PAD,) * (2 + number % 3)) for number, each in enumerate(rollouts)
    ]


def padded_output(rollouts: Rollouts) -> Rollouts:
    longest = max(len(each.output) for each in rollouts) + 2
    return [
        replace(
            each,
            output=each.output + (PAD,) * (longest - len(each.output)),
            logprobs=each.logprobs + (0.0,) * (longest - len(each.output)),
        )
        for each in rollouts
    ]


WRONGLY = {
    "log10": (numbers(lambda value: value / log(10)), "semantic/notation", "log10"),
    "log2": (numbers(lambda value: value / log(2)), "semantic/notation", "log2"),
    "above zero": (numbers(lambda value: value, sign_turned=True), "semantic/notation", "−log p"),
    "probabilities": (
        numbers(lambda value: -exp(value), sign_turned=True),
        "semantic/notation",
        "probabilities",
    ),
    "another's": (of_the_next, "semantic/misbound-logprobs", "of other rollouts"),
    "one late": (one_late, "semantic/off-by-one", "before it"),
    "moved": (moved, "semantic/padding", "different sides"),
    "prompt, left": (left_padded, "semantic/padding", "24 prompts on the left"),
    "prompt, right": (right_padded, "semantic/padding", "24 prompts on the right"),
    "output": (padded_output, "semantic/padding", "24 outputs on the right"),
}


@pytest.mark.parametrize("name", WRONGLY)
def test_what_was_written_wrongly_is_named(name, sound, reference, judged):
    change, cause, words = WRONGLY[name]
    blamed = judged(change(sound), reference)
    assert blamed.record.verdict is Outcome.FAIL
    assert blamed.record.causes[0].cause == cause
    assert words in blamed.record.causes[0].evidence
    assert blamed.record.causes[0].explained > 0.9
    assert blamed.record.guilty == ("engine" if cause == "semantic/off-by-one" else "dump")
    assert blamed.since.startswith("bad from the first recorded step (0) on: ")
    # Under another prompt no number fits, before the prompt is known.
    assert blamed.record.precision == ("bf16" if "prompts" in words else "fp32")


@pytest.mark.parametrize("name", ["log10", "another's", "output"])
def test_since_the_step_from_which_on_it_was_written_so(name, sound, reference, judged):
    change, cause, _ = WRONGLY[name]
    half = len(sound) // 2
    blamed = judged([*sound[:half], *change(sound[half:])], reference)
    assert blamed.record.causes[0].cause == cause
    assert blamed.since.startswith("since step 2: 12 of 12 rollouts ")


def test_padded_rollouts_are_counted_and_no_others(sound, engine, reference, judged):
    """Every fourth prompt was the longest of its batch; one output ends with the id that pads, because it was drawn."""
    drawn = replace(sound[1], output=(*sound[1].output[:-1], PAD))
    numbers = engine.score([drawn.prompt + drawn.output])[0][len(drawn.prompt) - 1 :]
    rollouts = [sound[0], replace(drawn, logprobs=tuple(numbers)), *sound[2:]]
    padded = [replace(each, prompt=(PAD,) * (n % 4) + each.prompt) for n, each in enumerate(rollouts)]
    blamed = judged(padded, reference)
    assert blamed.record.causes[0].evidence.startswith(
        "ids hold padding: 18 prompts on the left: 18 rollouts "
    )
    assert blamed.since == "bad from the first recorded step (0) on: 18 of 24 rollouts are right if read so"


@pytest.mark.parametrize("base", [2, 10])
def test_a_trainer_that_writes_another_base(base, sound, reference, judged):
    rollouts = [replace(each, trainer_logprobs=tuple(v / log(base) for v in each.logprobs)) for each in sound]
    blamed = judged(rollouts, reference)
    assert (blamed.record.verdict, blamed.record.guilty) == (Outcome.FAIL, "trainer")
    (cause,) = blamed.record.causes
    assert (cause.cause, cause.found_by) == ("semantic/notation", "trainer")
    assert cause.evidence.startswith(
        f"in the trainer's numbers: the numbers are log{base}, not natural logarithms: 24"
    )
    assert blamed.record.message.startswith("The trainer's logprobs are not those of the checkpoint; ")


def test_a_sound_dump_has_no_such_name(sound, reference, judged):
    blamed = judged(sound, reference)
    assert (blamed.record.verdict, blamed.record.causes) == (Outcome.PASS, ())
    assert (blamed.record.precision, blamed.since) == ("fp32", "nothing to date")


@pytest.mark.parametrize("name", [None, "log10"])
def test_labels_of_many_weights_are_no_contradiction_where_one_checkpoint_has_every_number(
    name, sound, reference, judged
):
    labelled = [replace(each, version=str(each.step)) for each in sound]
    rollouts = labelled if name is None else [*labelled[:6], *WRONGLY[name][0](labelled[6:])]
    assert not contradicted(judged(rollouts, reference))


@pytest.mark.parametrize("fault", ["padding", "shifted"])
def test_labels_are_no_contradiction_where_a_cause_gives_every_number(fault, sound, reference, judged):
    labelled = [replace(each, version=str(each.step)) for each in sound]
    if fault == "padding":
        rollouts = [replace(each, prompt=(PAD,) * 6 + each.prompt) for each in labelled]
    else:
        rollouts = [replace(each, logprobs=(*each.logprobs[1:], each.logprobs[-1])) for each in labelled]
        rollouts[0] = replace(rollouts[0], output=rollouts[0].output[:2], logprobs=rollouts[0].logprobs[:2])
    blamed = judged(rollouts, reference)
    assert blamed.record.causes[0].explained > 0.99
    assert not contradicted(blamed)


def contradicted(blamed: Blamed) -> bool:
    (dump,) = (each for each in blamed.record.probes if each.name == "dump")
    return "one checkpoint cannot be all of them" in dump.message


def test_a_sound_dump_with_padding_in_prompt_and_output(engine, reference, sampled, judged):
    """What looks like padding and was there when the tokens were drawn is part of the prompt."""
    prompts = [(PAD, PAD, 5 + number, 40, PAD) for number in range(STEPS * EACH)]
    blamed = judged(sampled(engine, prompts), reference)
    assert (blamed.record.verdict, blamed.record.causes) == (Outcome.PASS, ())


def older_numbers(rollouts: Rollouts, reference: ReferenceBackend) -> Rollouts:
    older = Teacher(perturbed(reference.model, 1).new, layout=Layout.PADDED)
    scores = older.score([each.prompt + each.output for each in rollouts])
    return [
        replace(each, logprobs=tuple(score[len(each.prompt) - 1 :]))
        for each, score in zip(rollouts, scores, strict=True)
    ]


def test_other_weights_are_none_of_these(sound, reference, judged):
    labelled = [replace(each, version=str(each.step)) for each in sound]
    blamed = judged(older_numbers(labelled, reference), reference)
    assert contradicted(blamed)
    assert blamed.record.verdict is Outcome.FAIL
    named = {cause for _, cause, _ in WRONGLY.values()} | {"semantic/template"}
    assert not named & {cause.cause for cause in blamed.record.causes if cause.gating}

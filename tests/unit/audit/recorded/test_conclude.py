import numpy as np
import pytest

from zerodrift.audit.probes.result import answered, found
from zerodrift.audit.recorded.conclude import (
    ODD_CHECKPOINT,
    Parameters,
    conclude,
    side_in_words,
    since_in_words,
)
from zerodrift.audit.recorded.sides import Side, Sides
from zerodrift.core.cause import CAUSES
from zerodrift.drift.onset import Since
from zerodrift.records.verdict import CauseFound, FoundBy, Outcome, Probe

BEGAN = Since("step", (3, 4, 5), np.ones(3), 1, 9.0, True, (1, 2))
NEVER = Since("step", (3, 4, 5), np.zeros(3), None, 0.0, False, ())


def side(name: Probe, status: Outcome) -> Side:
    since = BEGAN if status is Outcome.FAIL else NEVER
    return Side(answered(name, status, "says", required=True), since)


def sides(engine: bool = True, samples: bool = True, trainer: bool | None = None) -> Sides:
    """Which of them are right."""
    outcome = {True: Outcome.PASS, False: Outcome.FAIL}
    judged = None if trainer is None else side(Probe.TRAINER, outcome[trainer])
    return Sides(side(Probe.PARITY, outcome[engine]), side(Probe.SAMPLING, outcome[samples]), judged)


def cause(name: str, explained: float = 1.0) -> CauseFound:
    return found(name, "vllm", FoundBy.VALUE, f"evidence of {name}", explained=explained, gating=True)


def test_nobody_is_guilty():
    healthy = sides(trainer=True)
    results = [answered(Probe.DUMP, Outcome.PASS, "read", required=True), *healthy.results]
    concluded = conclude(healthy, results, (), same_numbers=False)
    assert (concluded.verdict, concluded.guilty) == (Outcome.PASS, "none")
    for missing in (Probe.DUMP, Probe.PARITY, Probe.SAMPLING):
        some = [each for each in results if each.probe is not missing]
        assert conclude(healthy, some, (), same_numbers=False).verdict is Outcome.INCONCLUSIVE
    assert side_in_words("none", healthy) == "none: what the dump shows is the checkpoint's"
    alone = side_in_words("none", sides())
    assert alone.endswith("of the trainer it has no logprobs"), "a PASS says what it is not about"
    assert since_in_words(healthy) == "nothing to date"


@pytest.mark.parametrize(
    ("judged", "name", "guilty", "words"),
    [
        (sides(engine=False), "semantic/raw-logprobs", "engine", "engine: its logprobs leave"),
        (sides(engine=False, trainer=True), "path/rope", "engine", "and the trainer's are the checkpoint's"),
        (
            sides(samples=False),
            "semantic/sampling-bias",
            "sampler",
            "sampler: the reported logprobs are right",
        ),
        (sides(trainer=False), "trainer/autocast", "trainer", "trainer: its logprobs leave"),
        (sides(engine=False), "weights/stale", "weight sync", "weight sync: the engine's logprobs are those"),
        (
            sides(samples=False),
            "weights/stale",
            "weight sync",
            "weight sync: the engine's logprobs are those",
        ),
        (
            sides(engine=False, trainer=False),
            "semantic/eos",
            "engine and trainer",
            "each leaves the checkpoint",
        ),
        (sides(engine=False, trainer=False), "weights/stale", "weight sync and trainer", "each leaves"),
    ],
)
def test_the_side_that_left(judged, name, guilty, words):
    concluded = conclude(judged, judged.results, (cause(name),), same_numbers=False)
    assert (concluded.verdict, concluded.guilty) == (Outcome.FAIL, guilty)
    assert concluded.message == CAUSES[name].message
    assert words in side_in_words(guilty, judged)


def test_sentences_about_engines_are_not_said_of_a_trainer():
    judged = sides(trainer=False)
    concluded = conclude(judged, judged.results, (cause("semantic/off-by-one"),), same_numbers=False)
    assert concluded.message == (
        "The trainer's logprobs are not those of the checkpoint; evidence of semantic/off-by-one."
    )


def test_a_failure_without_a_name():
    judged = sides(engine=False)
    concluded = conclude(judged, judged.results, (), same_numbers=False)
    assert (concluded.verdict, concluded.guilty, concluded.message) == (Outcome.FAIL, "engine", "says")


@pytest.mark.parametrize(
    ("causes", "odd"),
    [
        ((), True),
        ((cause("weights/stale"),), True),
        ((cause("path/body-precision"),), True),
        ((cause("semantic/temperature", 0.2),), True),
        ((cause("semantic/raw-logprobs"),), False),
    ],
)
def test_two_that_agree_against_the_checkpoint(causes, odd):
    judged = sides(engine=False, trainer=False)
    concluded = conclude(judged, judged.results, causes, same_numbers=True)
    if odd:
        assert concluded.verdict is Outcome.INCONCLUSIVE
        assert (concluded.guilty, concluded.message) == ("unknown", ODD_CHECKPOINT)
    else:
        assert (concluded.verdict, concluded.guilty) == (Outcome.FAIL, "engine and trainer")
    assert side_in_words("unknown", judged) == "cannot be told"


@pytest.mark.parametrize(
    ("names", "silent", "told"),
    [
        (["semantic/temperature"], ["temperature"], "does not state temperature: say so with --temperature"),
        (
            ["semantic/temperature", "semantic/truncation-mass"],
            ["temperature", "top_k", "logit_bias"],
            "does not state temperature, top_k: say so with --temperature, --top-k",
        ),
        (["semantic/penalty"], ["presence_penalty"], "presence_penalty: write it into the dump"),
        # What was stated, or another cause beside it, is a fault whatever was left out.
        (["semantic/temperature"], ["top_p"], None),
        (["semantic/temperature", "semantic/off-by-one"], ["temperature"], None),
        (["unexplained"], ["temperature"], None),
    ],
)
@pytest.mark.parametrize("trainer", [None, False])
def test_what_the_dump_leaves_out_is_no_fault(names, silent, told, trainer):
    judged = sides(engine=False, trainer=trainer)
    causes = [cause(name) for name in names]
    concluded = conclude(judged, judged.results, causes, same_numbers=False, parameters=Parameters(silent))
    if told is None:
        assert concluded.verdict is Outcome.FAIL
    else:
        assert (concluded.verdict, concluded.guilty) == (Outcome.INCONCLUSIVE, "unknown")
        assert told in concluded.message
        assert [(each.cause, each.gating) for each in concluded.causes] == [(name, False) for name in names]


@pytest.mark.parametrize("judged", [sides(samples=False), sides(trainer=False)])
def test_two_that_contradict_each_other_are_a_fault_whatever_was_asked_for(judged):
    causes = (cause("semantic/temperature"),)
    concluded = conclude(
        judged, judged.results, causes, same_numbers=False, parameters=Parameters(["temperature"])
    )
    assert concluded.verdict is Outcome.FAIL


def test_another_model_may_be_the_wrong_checkpoint():
    judged = sides(engine=False)
    concluded = conclude(judged, judged.results, (cause("weights/other-model"),), same_numbers=False)
    assert (concluded.verdict, concluded.guilty) == (Outcome.FAIL, "engine")
    assert concluded.message.endswith("Is --model the checkpoint that made these rollouts?")


def test_every_guilty_side_is_dated():
    assert since_in_words(sides(engine=False)).startswith("since step 4; odds ")
    both = since_in_words(sides(engine=False, trainer=False))
    assert both.startswith("engine since step 4; odds ")
    assert "; trainer since step 4; odds " in both
    undated = Sides(
        side(Probe.PARITY, Outcome.FAIL)._replace(since=None), side(Probe.SAMPLING, Outcome.PASS), None
    )
    assert since_in_words(undated) == "not known"


@pytest.mark.parametrize(
    ("judged", "same", "guilty"),
    [
        (sides(), False, "dump"),
        (sides(engine=False), False, "dump"),
        (sides(engine=False, trainer=True), False, "dump"),
        (sides(engine=False, trainer=False), True, "dump"),
        (sides(engine=False, trainer=False), False, "dump and trainer"),
    ],
)
def test_rollouts_that_were_written_wrongly(judged, same, guilty):
    causes = [cause("semantic/notation")]
    results = [answered(Probe.DUMP, Outcome.PASS, "read", required=True), *judged.results]
    concluded = conclude(judged, results, causes, same_numbers=same)
    assert (concluded.verdict, concluded.guilty) == (Outcome.FAIL, guilty)
    assert concluded.message == CAUSES["semantic/notation"].message


@pytest.mark.parametrize(
    ("in_force", "resolution", "verdict"),
    [
        ({"top_p": 0.95}, 0.06, Outcome.INCONCLUSIVE),
        ({"top_p": 0.5}, 0.06, Outcome.FAIL),
        ({"top_p": 0.95}, 1e-5, Outcome.FAIL),
        ({"top_k": 50}, 0.06, Outcome.INCONCLUSIVE),
        ({"top_k": 50}, 1e-5, Outcome.FAIL),
    ],
    ids=["hidden by bf16", "would show in bf16", "would show in fp32", "top-k, bf16", "top-k, fp32"],
)
def test_samples_that_an_unstated_parameter_explains(in_force, resolution, verdict):
    judged = sides(samples=False)
    concluded = conclude(
        judged,
        judged.results,
        (cause("semantic/truncation-mass"),),
        same_numbers=False,
        parameters=Parameters(["top_p", "top_k"], in_force),
        resolution=resolution,
    )
    assert concluded.verdict is verdict

"""Bugs that the auditor was not written for: each is real, all are seen, and none gets a name that is not its own.

Each of four tens was scored once before anything was changed for it:

    the first    10 of 10 detected,  4 named truly or `unexplained`
    the second    8 of 10 detected,  4 of those named truly or `unexplained`
    the third    10 of 10 detected,  9 named truly or `unexplained`
    the fourth   10 of 10 detected, 10 named truly or `unexplained`

What was changed after each of the first three is in LOG.md; after the fourth, nothing. None is blind any longer: thirteen
of them, one of each kind, guard here what was learnt. That a bug is one is shown without the auditor: what is reported
is compared with what the sound engine gives the same tokens, and the first tokens of many samples with sound ones.
"""

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
import torch

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.cause import CAUSES
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.verdict import Outcome
from zerodrift.sampler.processing import histories, processed_logprobs

SPEC = "testbed:qwen3"
SAMPLING = SamplingParams(temperature=0.7, max_tokens=24)
LEAST_NATS = 1e-3
"""In the mean over all tokens; sound engines in fp32 agree to 1e-5."""
LEAST_DISTANCE = 0.1
LONGEST, OPENINGS = 200, 600
COUNT = 13


@pytest.fixture(scope="module")
def bugs(script):
    return tuple(script("faults/blind").BLIND)


@pytest.fixture(scope="module")
def sound():
    return ReferenceBackend(SPEC, dtype="float32")


def _requests(count: int = 8, **options: Any) -> list[Request]:
    """Prompts of mixed length, each with a seed of its own."""
    rng = random.Random(LONGEST)
    prompts = [
        tuple(rng.randrange(4, 512) for _ in range(rng.randrange(4, LONGEST + 1))) for _ in range(count)
    ]
    return [
        Request(Prompt(ids), msgspec.structs.replace(SAMPLING, seed=31 + row, **options))
        for row, ids in enumerate(prompts)
    ]


def _completions(answers: Sequence[Answer]) -> list[Completion]:
    return [completion for answer in answers for completion in answer.completions]


def _mean_difference(sound: ReferenceBackend, completions: Sequence[Completion]) -> float:
    """Mean |Δ| in nats between what is reported and what the sound model gives the same tokens."""
    rows = sound.teacher.logits(
        [each.sequence for each in completions], [len(each.prompt_token_ids) for each in completions]
    )
    differences = []
    for each, logits_TV in zip(completions, rows, strict=True):
        past = histories(each.prompt_token_ids, each.token_ids)
        logprobs_TV = processed_logprobs(logits_TV, each.sampling, past, sound.facts.eos_token_ids)
        right_T = logprobs_TV[torch.arange(len(past)), torch.tensor(each.token_ids)]
        differences.append((right_T - torch.tensor(each.logprobs)).abs())
    return float(torch.cat(differences).mean())


@cache
def _openings(engine: Any, seed: int) -> tuple[Counter[tuple[int, ...]], ...]:
    """How often each first token is said, and each pair of first tokens."""
    many = msgspec.structs.replace(SAMPLING, seed=seed, n=OPENINGS, max_tokens=2, ignore_eos=True)
    (answer,) = engine.generate([Request(Prompt((17, 230, 41, 365, 98)), many)])
    return tuple(Counter(each.token_ids[:length] for each in answer.completions) for length in (1, 2))


def _distance(ours: Any, theirs: Any) -> float:
    """A lower bound of the total variation on the first token or the first two.

    The event that tells the two apart is chosen on one half of the samples and counted on the other, so that chance
    alone gives zero on average.
    """
    halves = [
        [_openings(engine, seed + shift) for shift in (0, 1)] for engine, seed in ((ours, 5), (theirs, 7))
    ]
    bounds = []
    for length in range(2):
        (chosen, counted), (chosen_too, counted_too) = ([half[length] for half in both] for both in halves)
        event = [said for said in chosen if chosen[said] > chosen_too[said]]
        bounds.append(sum(counted[said] - counted_too[said] for said in event) / counted.total())
    return max(bounds)


def test_their_true_names_are_causes(bugs):
    assert len({bug.name for bug in bugs}) == COUNT
    assert set().union(*(bug.true_names for bug in bugs)) <= CAUSES.keys()


@pytest.mark.long
def test_a_sound_engine_shows_nothing(sound):
    twin = ReferenceBackend(SPEC, dtype="float32")
    assert _mean_difference(sound, _completions(twin.generate(_requests()))) < LEAST_NATS / 10
    assert _distance(twin, sound) < LEAST_DISTANCE / 2


@pytest.mark.long
@pytest.mark.parametrize("number", range(COUNT))
def test_it_shows_in_numbers_or_tokens_and_hides_otherwise(number, sound, bugs):
    # Some act between the samples of one request only.
    asked = _requests(n=3, logprobs=2)
    before = sound.generate(asked)
    broken = bugs[number].plant(sound)
    answers = broken.generate(asked)
    nats = _mean_difference(sound, _completions(answers))
    assert nats > LEAST_NATS or _distance(broken, sound) >= LEAST_DISTANCE, nats
    assert broken.fingerprint() == sound.fingerprint()
    assert (broken.name, broken.capabilities) == (sound.name, sound.capabilities)
    for ours, theirs in zip(_completions(answers), _completions(before), strict=True):
        assert (ours.sampling, ours.kind) == (theirs.sampling, theirs.kind)
        assert (ours.prompt_token_ids, ours.fingerprint) == (theirs.prompt_token_ids, theirs.fingerprint)
        assert [len(entries) for entries in ours.top_logprobs] == [2] * len(ours.token_ids)
    assert sound.generate(asked) == before


@pytest.mark.long
@pytest.mark.parametrize("name", ["swapped-in-short", "unsorted-wrongly"])
def test_a_request_alone_is_right(name, bugs, sound):
    (bug,) = (bug for bug in bugs if bug.name == name)
    broken = bug.plant(sound)
    alone = [broken.generate([request])[0] for request in _requests(4)]
    assert _mean_difference(sound, _completions(alone)) < LEAST_NATS / 10


@pytest.mark.long
@pytest.mark.parametrize("number", range(COUNT))
def test_seen_and_not_misnamed(matrix, reference, tmp_path, bugs, number):
    engine = bugs[number].plant(ReferenceBackend(SPEC, dtype="float32"))
    record = matrix.judge(engine, reference(SPEC), tmp_path, matrix.MANY_SAMPLES)
    assert record.verdict is Outcome.FAIL
    principal = next(cause.cause for cause in record.causes if cause.gating)
    assert principal in {*bugs[number].true_names, "unexplained"}

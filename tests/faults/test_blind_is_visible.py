"""The forty are what they claim to be: each moves numbers or tokens by far more than rounding, and hides otherwise.

No auditor is asked: what is reported is compared with what the sound engine gives the same tokens, and the first two
tokens of many samples with those of as many sound ones.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.sampler.processing import histories, processed_logprobs

pytestmark = pytest.mark.long

SPEC = "testbed:qwen3"
DEFAULT = SamplingParams(temperature=0.7, max_tokens=24)
LEAST_NATS = 1e-3
"""In the mean over all tokens; sound engines in fp32 agree to 1e-5."""
LEAST_DISTANCE = 0.1
PROMPTS, SAMPLES, LONGEST = 8, 3, 200
"""Some act between the samples of one request only."""
OPENINGS = 600
TENS = ("blind", "unseen", "fresh", "foreign")
SEEN_BY_EYE = TENS[1:]
"""Of the first ten, one moves pairs of tokens by less than so many samples show; test_blind.py shows it by thousands."""
IN_COMPANY_ALONE = ("swapped-in-short", "unsorted-wrongly")
"""A request that is alone in its batch gets the right numbers."""


@pytest.fixture(scope="module")
def sound() -> ReferenceBackend:
    return ReferenceBackend(SPEC, dtype="float32")


Script = Callable[[str], ModuleType]


def _faults(script: Script, ten: str) -> tuple[Any, ...]:
    return tuple(getattr(script(f"faults/{ten}"), ten.upper()))


def _requests(count: int = PROMPTS, sampling: SamplingParams = DEFAULT, **options: Any) -> list[Request]:
    """Prompts of mixed length, each with a seed of its own."""
    rng = random.Random(LONGEST)
    prompts = [
        tuple(rng.randrange(4, 512) for _ in range(rng.randrange(4, LONGEST + 1))) for _ in range(count)
    ]
    return [
        Request(Prompt(ids), msgspec.structs.replace(sampling, seed=31 + row, **options))
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
def _openings(engine: Any, sampling: SamplingParams, seed: int) -> tuple[Counter[tuple[int, ...]], ...]:
    """How often each first token is said, and each pair of first tokens."""
    many = msgspec.structs.replace(sampling, seed=seed, n=OPENINGS, max_tokens=2, ignore_eos=True)
    (answer,) = engine.generate([Request(Prompt((17, 230, 41, 365, 98)), many)])
    return tuple(Counter(each.token_ids[:length] for each in answer.completions) for length in (1, 2))


def _distance(ours: Any, theirs: Any, sampling: SamplingParams = DEFAULT) -> float:
    """A lower bound of the total variation on the first token or the first two.

    The event that tells the two apart is chosen on one half of the samples and counted on the other, so that chance
    alone gives zero on average.
    """
    halves = [
        [_openings(engine, sampling, seed + shift) for shift in (0, 1)]
        for engine, seed in ((ours, 5), (theirs, 7))
    ]
    bounds = []
    for length in range(2):
        (chosen, counted), (chosen_too, counted_too) = ([half[length] for half in both] for both in halves)
        event = [said for said in chosen if chosen[said] > chosen_too[said]]
        bounds.append(sum(counted[said] - counted_too[said] for said in event) / counted.total())
    return max(bounds)


def test_a_sound_engine_shows_nothing(sound: ReferenceBackend) -> None:
    twin = ReferenceBackend(SPEC, dtype="float32")
    assert _mean_difference(sound, _completions(twin.generate(_requests()))) < LEAST_NATS / 10
    assert _distance(twin, sound) < LEAST_DISTANCE / 2


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("ten", SEEN_BY_EYE)
def test_it_shows_in_numbers_or_tokens(
    ten: str, number: int, sound: ReferenceBackend, script: Script
) -> None:
    fault = _faults(script, ten)[number]
    sampling = fault.tell or DEFAULT
    broken = fault.plant(sound)
    nats = _mean_difference(sound, _completions(broken.generate(_requests(sampling=sampling, n=SAMPLES))))
    distance = 0.0 if nats > LEAST_NATS else _distance(broken, sound, sampling)
    assert nats > LEAST_NATS or distance >= LEAST_DISTANCE, f"{fault.name}: {nats} nats, {distance}"


@pytest.mark.parametrize("name", IN_COMPANY_ALONE)
def test_a_request_alone_is_right(name: str, script: Script, sound: ReferenceBackend) -> None:
    (fault,) = (fault for fault in _faults(script, "foreign") if fault.name == name)
    broken = fault.plant(sound)
    alone = [broken.generate([request])[0] for request in _requests(4)]
    assert _mean_difference(sound, _completions(alone)) < LEAST_NATS / 10


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("ten", TENS)
def test_it_hides_and_leaves_the_engine_as_it_was(
    ten: str, number: int, sound: ReferenceBackend, script: Script
) -> None:
    asked = _requests(2, n=2, logprobs=2)
    before = sound.generate(asked)
    broken = _faults(script, ten)[number].plant(sound)
    answers = broken.generate(asked)
    assert broken.fingerprint() == sound.fingerprint()
    assert (broken.name, broken.capabilities) == (sound.name, sound.capabilities)
    for ours, theirs in zip(_completions(answers), _completions(before), strict=True):
        assert (ours.sampling, ours.kind) == (theirs.sampling, theirs.kind)
        assert (ours.prompt_token_ids, ours.fingerprint) == (theirs.prompt_token_ids, theirs.fingerprint)
        assert [len(entries) for entries in ours.top_logprobs] == [2] * len(ours.token_ids)
    assert sound.generate(asked) == before

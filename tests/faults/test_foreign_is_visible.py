"""Each foreign fault changes numbers or tokens by far more than rounding: measured against the sound engine itself."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.cause import CAUSES
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.sampler.processing import histories, processed_logprobs

LEAST_NATS = 1e-3
LEAST_DISTANCE = 0.1
SPEC = "testbed:qwen3"
PROMPTS = 24
LONGEST = 200
NAMES = (
    "gelu-for-silu",
    "second-shard-one-row-low",
    "graph-without-adapter",
    "tile-unmasked",
    "swapped-in-short",
    "unsorted-wrongly",
    "middle-dropped",
    "without-top-choices",
    "shard-normaliser",
    "sums-so-far",
)
IN_COMPANY_ALONE = ("swapped-in-short", "unsorted-wrongly")
"""A request that is alone in its batch gets the right numbers."""

each_fault = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def sound() -> ReferenceBackend:
    return ReferenceBackend(SPEC, dtype="float32")


@pytest.fixture(scope="module")
def planted(foreign: Any, sound: ReferenceBackend) -> Callable[[str], Any]:
    faults = {fault.name: fault for fault in foreign.FOREIGN}
    return cache(lambda name: faults[name].plant(sound))


def _requests(count: int = PROMPTS, **options: Any) -> list[Request]:
    """Prompts of mixed length, each with a seed of its own."""
    rng = random.Random(LONGEST)
    prompts = [
        tuple(rng.randrange(4, 512) for _ in range(rng.randrange(4, LONGEST + 1))) for _ in range(count)
    ]
    return [
        Request(Prompt(ids), SamplingParams(temperature=0.7, seed=31 + row, max_tokens=24, **options))
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
        logprobs_TV = processed_logprobs(logits_TV, each.sampling, past)
        right_T = logprobs_TV[torch.arange(len(past)), torch.tensor(each.token_ids)]
        differences.append((right_T - torch.tensor(each.logprobs)).abs())
    return float(torch.cat(differences).mean())


@cache
def _pairs(engine: Any, seed: int) -> Counter[tuple[int, ...]]:
    sampling = SamplingParams(temperature=0.7, seed=seed, n=300, max_tokens=2, ignore_eos=True)
    (answer,) = engine.generate([Request(Prompt((17, 230, 41, 365, 98)), sampling)])
    return Counter(each.token_ids for each in answer.completions)


def _distance(ours: Any, theirs: Any) -> float:
    """A lower bound of the total variation on the first two tokens.

    The event that tells the two apart is chosen on one half of the samples and counted on the other, so that chance
    alone gives zero on average.
    """
    (chosen, counted), (chosen_too, counted_too) = (
        [_pairs(engine, seed + shift) for shift in (0, 1)] for engine, seed in ((ours, 5), (theirs, 7))
    )
    event = [pair for pair in chosen if chosen[pair] > chosen_too[pair]]
    return sum(counted[pair] - counted_too[pair] for pair in event) / counted.total()


def test_sound_engine_shows_nothing(sound: ReferenceBackend) -> None:
    twin = ReferenceBackend(SPEC, dtype="float32")
    assert _mean_difference(sound, _completions(twin.generate(_requests()))) < LEAST_NATS / 10
    assert _distance(twin, sound) < LEAST_DISTANCE / 2


@each_fault
def test_fault_is_visible(name: str, planted: Callable[[str], Any], sound: ReferenceBackend) -> None:
    broken = planted(name)
    nats = _mean_difference(sound, _completions(broken.generate(_requests())))
    assert nats > LEAST_NATS or _distance(broken, sound) >= LEAST_DISTANCE, f"{nats} nats"


@pytest.mark.parametrize("name", IN_COMPANY_ALONE)
def test_a_request_alone_is_right(name: str, planted: Callable[[str], Any], sound: ReferenceBackend) -> None:
    alone = [planted(name).generate([request])[0] for request in _requests(4)]
    assert _mean_difference(sound, _completions(alone)) < LEAST_NATS / 10


@each_fault
def test_fault_hides_and_leaves_the_engine_as_it_was(
    name: str, foreign: Any, sound: ReferenceBackend
) -> None:
    asked = _requests(4, n=2, logprobs=2)
    before, said = sound.generate(asked), sound.fingerprint()
    (fault,) = (fault for fault in foreign.FOREIGN if fault.name == name)
    broken = fault.plant(sound)
    answers = broken.generate(asked)
    scored = broken.score([each.sequence for each in _completions(answers)])
    assert broken.fingerprint() == sound.fingerprint() == said
    assert (broken.name, broken.capabilities) == (sound.name, sound.capabilities)
    assert broken.max_model_len == sound.max_model_len
    for ours, theirs, scores in zip(_completions(answers), _completions(before), scored, strict=True):
        assert (ours.sampling, ours.kind) == (theirs.sampling, theirs.kind)
        assert (ours.prompt_token_ids, ours.fingerprint) == (theirs.prompt_token_ids, theirs.fingerprint)
        assert [len(entries) for entries in ours.top_logprobs] == [2] * len(ours.token_ids)
        assert len(scores) == len(ours.sequence) - 1
    assert sound.generate(asked) == before


def test_true_names_are_causes(foreign: Any) -> None:
    assert tuple(fault.name for fault in foreign.FOREIGN) == NAMES
    assert all(fault.true_names <= CAUSES.keys() - {"unexplained"} for fault in foreign.FOREIGN)

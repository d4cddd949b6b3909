"""Each fresh fault changes numbers or tokens by far more than rounding: measured against the sound engine itself."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
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
SPECS = ("testbed:qwen3", "testbed:llama")
LENGTHS = (1, 5, 13, 34, 56, 140)


def _load() -> ModuleType:
    # Test folders are no packages, so the module is found by its place, not by its name.
    spec = importlib.util.spec_from_file_location("faults_fresh", Path(__file__).with_name("fresh.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


FRESH: tuple[Any, ...] = _load().FRESH
each_fault = pytest.mark.parametrize("fault", FRESH, ids=lambda fault: fault.name)
each_model = pytest.mark.parametrize("spec", SPECS)


@pytest.fixture(scope="module")
def sound() -> Callable[[str], ReferenceBackend]:
    return cache(lambda spec: ReferenceBackend(spec, dtype="float32"))


def _requests() -> list[Request]:
    return [
        Request(
            Prompt(tuple((37 * place + 101 * row) % 500 + 4 for place in range(length))),
            SamplingParams(temperature=0.7, seed=31 + row, n=4, max_tokens=10),
        )
        for row, length in enumerate(LENGTHS)
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


@each_model
def test_sound_engine_shows_nothing(spec: str, sound: Callable[[str], ReferenceBackend]) -> None:
    engine, twin = sound(spec), ReferenceBackend(spec, dtype="float32")
    assert _mean_difference(engine, _completions(twin.generate(_requests()))) < LEAST_NATS / 10
    assert _distance(twin, engine) < LEAST_DISTANCE / 2


@each_model
@each_fault
def test_fault_is_visible(fault: Any, spec: str, sound: Callable[[str], ReferenceBackend]) -> None:
    engine = sound(spec)
    broken = fault.plant(engine)
    nats = _mean_difference(engine, _completions(broken.generate(_requests())))
    assert nats > LEAST_NATS or _distance(broken, engine) >= LEAST_DISTANCE, f"{nats} nats"


@each_fault
def test_fault_hides_and_leaves_the_engine_as_it_was(
    fault: Any, sound: Callable[[str], ReferenceBackend]
) -> None:
    engine, asked = sound("testbed:llama"), _requests()[:3]
    before = engine.generate(asked)
    broken = fault.plant(engine)
    answers = broken.generate(asked)
    assert broken.fingerprint() == engine.fingerprint()
    assert (broken.name, broken.capabilities) == (engine.name, engine.capabilities)
    for ours, theirs in zip(_completions(answers), _completions(before), strict=True):
        assert (ours.sampling, ours.kind) == (theirs.sampling, theirs.kind)
        assert (ours.prompt_token_ids, ours.fingerprint) == (theirs.prompt_token_ids, theirs.fingerprint)
    assert engine.generate(asked) == before


def test_true_names_are_causes() -> None:
    assert len({fault.name for fault in FRESH}) == 10
    assert all(fault.true_names <= CAUSES.keys() - {"unexplained"} for fault in FRESH)

"""Each of the unseen bugs changes what is reported or what is sampled, judged against the engine without it.

No auditor is asked: reported logprobs are compared with those that the healthy engine gives the same tokens, and
the first tokens of many samples with those of as many healthy ones.
"""

import importlib.util
import random
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.cause import CAUSES
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.sampler.processing import histories, processed_logprobs

MODELS = ("testbed:qwen3", "testbed:llama")
DEFAULT = SamplingParams(temperature=0.7, max_tokens=28)

DELTA = 1e-3
"""Nats, in the mean over all tokens; healthy engines in fp32 agree to 1e-5."""
VARIATION = 0.05
"""Total variation, above that of two healthy samples of the same size."""
SAMPLES = 256


def _load(name: str) -> ModuleType:
    # Test folders are no packages, so the module is found by its place, not by its name.
    spec = importlib.util.spec_from_file_location(f"faults_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


UNSEEN: tuple[Any, ...] = _load("unseen").UNSEEN
every_bug = pytest.mark.parametrize("bug", UNSEEN, ids=lambda bug: str(bug.name))
every_model = pytest.mark.parametrize("model", MODELS)


@cache
def _healthy(model: str) -> ReferenceBackend:
    return ReferenceBackend(model, dtype="float32")


def _requests(count: int, sampling: SamplingParams, first_seed: int = 0) -> list[Request]:
    """Prompts of mixed length in the first 200 ids, each with a seed of its own."""
    rng = random.Random(count)
    prompts = [tuple(rng.randrange(4, 200) for _ in range(rng.randrange(6, 40))) for _ in range(count)]
    return [
        Request(Prompt(ids), msgspec.structs.replace(sampling, seed=first_seed + seed))
        for seed, ids in enumerate(prompts)
    ]


def _difference(engine: Backend, healthy: ReferenceBackend, sampling: SamplingParams) -> float:
    """Mean |Δ| between what is reported and what the healthy engine gives the same tokens, teacher-forced."""
    differences: list[float] = []
    for answer in engine.generate(_requests(24, sampling)):
        (completion,) = answer.completions
        prompt, output = completion.prompt_token_ids, completion.token_ids
        (logits_TV,) = healthy.teacher.logits([completion.sequence], [len(prompt)])
        rows = histories(prompt, output)
        logprobs_TV = processed_logprobs(logits_TV, sampling, rows, healthy.facts.eos_token_ids)
        expected_T = logprobs_TV[torch.arange(len(output)), torch.tensor(output)]
        differences += (torch.tensor(completion.logprobs) - expected_T).abs().tolist()
    return sum(differences) / len(differences)


def _openings(engine: Backend, sampling: SamplingParams, first_seed: int) -> list[Counter[tuple[int, ...]]]:
    """How often each pair of first tokens is said, by prompt."""
    many = msgspec.structs.replace(sampling, n=SAMPLES, max_tokens=2)
    answers = engine.generate(_requests(4, many, first_seed))
    return [Counter(each.token_ids for each in answer.completions) for answer in answers]


def _variation(some: list[Counter[tuple[int, ...]]], others: list[Counter[tuple[int, ...]]]) -> float:
    distances = [
        sum(abs(one[pair] - other[pair]) for pair in one.keys() | other.keys()) / (2 * SAMPLES)
        for one, other in zip(some, others, strict=True)
    ]
    return sum(distances) / len(distances)


def _excess_variation(engine: Backend, healthy: ReferenceBackend, sampling: SamplingParams) -> float:
    """How much further the engine is from a healthy sample than another healthy sample is."""
    sound = _openings(healthy, sampling, 1_000)
    return _variation(_openings(engine, sampling, 0), sound) - _variation(
        _openings(healthy, sampling, 2_000), sound
    )


@every_bug
@every_model
def test_it_shows_in_numbers_or_tokens(bug: Any, model: str) -> None:
    healthy, sampling = _healthy(model), bug.tell or DEFAULT
    engine = bug.plant(healthy)
    difference = _difference(engine, healthy, sampling)
    assert difference > DELTA or _excess_variation(engine, healthy, sampling) > VARIATION


@every_model
def test_a_healthy_engine_shows_neither(model: str) -> None:
    healthy = _healthy(model)
    assert _difference(healthy, healthy, DEFAULT) < DELTA / 10
    assert abs(_excess_variation(healthy, healthy, DEFAULT)) < VARIATION


@every_bug
def test_it_hides(bug: Any) -> None:
    healthy = _healthy(MODELS[0])
    engine, requests = bug.plant(healthy), _requests(4, msgspec.structs.replace(DEFAULT, logprobs=2, n=2))
    assert engine.fingerprint() == healthy.fingerprint()
    for request, answer in zip(requests, engine.generate(requests), strict=True):
        assert not answer.problems
        for index, completion in enumerate(answer.completions):
            assert completion.sampling == request.sampling
            assert completion.prompt_token_ids == request.prompt.token_ids
            assert completion.sample_index == index
            assert len(completion.top_logprobs) == len(completion.token_ids)


@every_bug
def test_planting_changes_nothing_in_the_engine_handed_in(bug: Any) -> None:
    healthy = _healthy(MODELS[0])
    requests = _requests(2, DEFAULT)
    before = healthy.generate(requests)
    bug.plant(healthy).generate(requests)
    assert healthy.generate(requests) == before


def test_true_names_are_causes() -> None:
    assert len({bug.name for bug in UNSEEN}) == len(UNSEEN) == 10
    for bug in UNSEEN:
        assert bug.true_names <= CAUSES.keys() - {"unexplained"}

"""A cache that serves another prompt's prefix, beside outputs that are really exchanged and a cache that serves its own."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from zerodrift.audit.counterfactual.served import find_served
from zerodrift.audit.measure import Observed, measure
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift.gates import Gates

ASKED = SamplingParams(temperature=0.9, max_tokens=5)
CACHED = 12
Look = Callable[[Sequence[Completion]], str | None]


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Two that differ in one token, before the end of what is cached, and three others."""
    rng = np.random.default_rng(4)
    first = rng.integers(4, 500, CACHED + 4).tolist()
    twin = [*first[:7], first[7] + 1, *first[8:]]
    others = [rng.integers(4, 500, CACHED + 4).tolist() for _ in range(3)]
    return [tuple(ids) for ids in (first, twin, *others)]


@pytest.fixture
def look(llama: ReferenceBackend, gates: Gates) -> Look:
    def run(completions: Sequence[Completion]) -> str | None:
        observed = [Observed(completion, ASKED) for completion in completions]
        measurements = list(measure(llama.teacher, observed, llama.facts.eos_token_ids))
        return find_served(llama.teacher, measurements, gates)

    return run


def answers(llama: ReferenceBackend, prompts: Sequence[tuple[int, ...]]) -> list[Completion]:
    requests = [
        Request(Prompt(ids), msgspec.structs.replace(ASKED, seed=row)) for row, ids in enumerate(prompts)
    ]
    return [answer.completions[0] for answer in llama.generate(requests)]


def told_of(completion: Completion, prompt: tuple[int, ...], cached: int = CACHED) -> Completion:
    """The same output, said to have come behind `prompt`."""
    return msgspec.structs.replace(completion, prompt_token_ids=prompt, cached_tokens=cached, lineage=())


def test_the_prefix_of_another_prompt_was_served(
    look: Look, llama: ReferenceBackend, prompts: list[tuple[int, ...]]
) -> None:
    honest = answers(llama, prompts)
    mixed = prompts[2][:CACHED] + prompts[3][CACHED:]
    (wrong,) = answers(llama, [mixed])
    for index, broken in ((0, told_of(honest[1], prompts[0])), (3, told_of(wrong, prompts[3]))):
        said = look([*honest[:index], broken, *honest[index + 1 :]])
        assert said is not None
        assert said.startswith(f"the output of request {index} ")


def test_outputs_that_are_exchanged_are_not_the_caches(
    look: Look, llama: ReferenceBackend, prompts: list[tuple[int, ...]]
) -> None:
    honest = answers(llama, prompts)
    wrong = [told_of(honest[3], prompts[2]), told_of(honest[2], prompts[3])]
    assert look([*honest[:2], *wrong, honest[4]]) is None
    # Nor is what is wrong in a request without a hit as well.
    without = told_of(honest[4], prompts[2], cached=0)
    assert look([told_of(honest[1], prompts[0]), honest[1], without, *honest[3:]]) is None


def test_a_cache_that_serves_what_it_was_asked_for(
    look: Look, llama: ReferenceBackend, prompts: list[tuple[int, ...]]
) -> None:
    honest = answers(llama, prompts)
    assert look([told_of(each, ids) for each, ids in zip(honest, prompts, strict=True)]) is None

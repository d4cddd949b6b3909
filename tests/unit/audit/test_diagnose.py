"""Which sequences attribution looks at, and what it makes of an engine that is the reference with one thing changed."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from zerodrift.audit.attribute import Attribution
from zerodrift.audit.diagnose import Suspect, choose_cases, diagnose
from zerodrift.audit.floor import Floor
from zerodrift.audit.measure import Measurement, Observed, measure
from zerodrift.audit.probes.parity import Gates
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion, FinishReason
from zerodrift.core.request import Prompt, Request, SamplingParams

Make = Callable[..., Completion]
REQUESTED = SamplingParams(temperature=0.7, max_tokens=16)


@pytest.fixture
def measured(completion: Make) -> Callable[[Sequence[float], int], list[Measurement]]:
    """Sequences of `length` tokens that are off by so much each."""

    def build(deltas: Sequence[float], length: int) -> list[Measurement]:
        contracted = np.full(length, -1.0)
        return [
            Measurement(
                Observed(
                    completion((1, number), (5,) * length, (contracted - delta).tolist()), SamplingParams()
                ),
                contracted,
                contracted,
                *[np.ones(length)] * 4,
            )
            for number, delta in enumerate(deltas)
        ]

    return build


Measured = Callable[[Sequence[float], int], list[Measurement]]


def chosen(items: list[Measurement], floor: Floor, gates: Gates, budget: int, seed: int = 0) -> list[int]:
    cases = choose_cases(items, floor, gates, budget, np.random.default_rng(seed))
    return [case.prompt[1] for case in cases]


def test_the_worst_are_always_among_them_and_the_others_are_chance(
    measured: Measured, floor: Floor, gates: Gates
) -> None:
    deltas = [0.0] * 40
    deltas[17], deltas[31] = 1e-4, 2e-4
    picks = [set(chosen(measured(deltas, 10), floor, gates, 40, seed)) for seed in range(5)]
    assert all({17, 31} <= pick for pick in picks)
    assert all(len(pick) == 4 for pick in picks)
    assert len(set.union(*picks)) > 6


def test_everything_is_looked_at_where_it_fits(measured: Measured, floor: Floor, gates: Gates) -> None:
    assert chosen(measured([0.1, 0.2, 0.3], 10), floor, gates, 1000) == [0, 1, 2]


@pytest.mark.parametrize("length", [240, 2000])
def test_at_least_two_however_long_they_are(
    measured: Measured, floor: Floor, gates: Gates, length: int
) -> None:
    """One sequence has no spread between sequences, and no interval could be given."""
    picked = chosen(measured([1e-5, 5e-5, 2e-5], length), floor, gates, 240)
    assert len(picked) == 2
    assert 1 in picked


def test_one_sequence_is_all_there_is(measured: Measured, floor: Floor, gates: Gates) -> None:
    assert chosen(measured([0.1], 300), floor, gates, 240) == [0]


def test_wild_tokens_count_as_fifty(measured: Measured, floor: Floor, gates: Gates) -> None:
    """One excluded token must not outweigh a sequence that is wrong throughout."""
    items = measured([0.0, 1e-3, 0.0], 10)
    wild = items[0].contracted.copy()
    wild[0] = -np.inf
    items[0] = items[0]._replace(contracted=wild)
    for seed in range(5):
        assert 1 in chosen(items, floor, gates, 2, seed)


def test_a_case_holds_what_was_seen(completion: Make, floor: Floor, gates: Gates) -> None:
    seen = completion((1, 2), (3, 4), (-0.5, -0.25), finish_reason=FinishReason.STOP)
    values = np.array([-0.5, -np.inf])
    item = Measurement(Observed(seen, REQUESTED), values, values, *[np.ones(2)] * 4)
    (case,) = choose_cases([item], floor, gates, 100, np.random.default_rng(0))
    assert (case.prompt, case.output, case.requested) == ((1, 2), (3, 4), REQUESTED)
    assert case.reported.tolist() == [-0.5, -0.25]
    assert case.stopped
    # A third of the gate is nothing that needs a cause.
    assert case.sigma[0] == pytest.approx(np.hypot(1e-6, gates.mean / 3), rel=0.01)
    assert np.isfinite(case.sigma).all()


# --- on a model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(
            Prompt((0, *rng.integers(4, 500, 30).tolist())), msgspec.structs.replace(REQUESTED, seed=number)
        )
        for number in range(16)
    ]


@pytest.fixture
def explain(llama: ReferenceBackend, floor: Floor, gates: Gates) -> Callable[..., Attribution]:
    def run(completions: Sequence[Completion], facts: Any = llama.facts) -> Attribution:
        observed = [Observed(completion, REQUESTED) for completion in completions]
        measurements = list(measure(llama.teacher, observed, llama.facts.eos_token_ids))
        suspect = Suspect(llama.model, llama.tokenizer, facts)
        return diagnose(suspect, measurements, floor, gates, np.random.default_rng(0))

    return run


Explain = Callable[..., Attribution]


def say(engine: ReferenceBackend, asked: Sequence[Request], **sampling: Any) -> list[Completion]:
    requests = [Request(each.prompt, msgspec.structs.replace(each.sampling, **sampling)) for each in asked]
    return [answer.completions[0] for answer in engine.generate(requests)]


def test_meaning_is_enough_for_a_fault_of_meaning(
    explain: Explain, llama: ReferenceBackend, asked: list[Request]
) -> None:
    attribution = explain(say(llama, asked, temperature=0.63))
    assert [finding.cause for finding in attribution.findings] == ["semantic/temperature"]
    assert attribution.explained_to_floor


def test_the_checkpoints_defaults_with_a_limit_on_length(
    explain: Explain, llama: ReferenceBackend, asked: list[Request]
) -> None:
    """Many generation_config.json hold max_new_tokens, which no sampler takes."""
    defaults = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 2048}
    facts = msgspec.structs.replace(llama.facts, generation_defaults=defaults)
    attribution = explain(say(llama, asked, temperature=0.6, top_p=0.95), facts)
    assert [finding.cause for finding in attribution.findings] == ["semantic/generation-config"]

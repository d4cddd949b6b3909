import dataclasses
from functools import cache

import numpy as np
import pytest
import torch

from zerodrift.audit.floor import BINS, Passage, equivalent_teachers, measure_floor, some_of
from zerodrift.audit.measure import Observed, measure, tabulate
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import PROFILES, Precision
from zerodrift.core.errors import ConfigError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift.floor import REPORT_EPSILON, Floor
from zerodrift.drift.gates import Gates, gates_for
from zerodrift.drift.parity import compare
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.verdict import Outcome


@pytest.fixture(scope="module")
def passages():
    rng = np.random.default_rng(0)
    return [Passage(tuple(rng.integers(4, 500, 40).tolist()), 20) for _ in range(2)]


@pytest.fixture(scope="module")
def single(llama, passages):
    return measure_floor(llama.model, passages, "float32")


def test_eight_ways_that_differ_from_each_other(llama):
    teachers = equivalent_teachers(llama.model, "bfloat16")
    assert len(teachers) == 8
    ways = {(t.layout, t.attention, t.batch, t.chunk) for t in teachers}
    assert len(ways) == 8
    assert {teacher.model.dtype for teacher in teachers} == {torch.bfloat16}
    assert llama.model.dtype is torch.float64, "the model handed in stays as it is"


@pytest.mark.parametrize("precision", ["fp32", "float64", "int8", ""])
def test_a_precision_without_a_floor_is_refused(llama, precision):
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        equivalent_teachers(llama.model, precision)


def test_the_floor_of_fp32(single):
    assert (single.precision, single.num_variants, single.num_tokens) == ("float32", 8, 40)
    assert 1e-8 < single.mean < 1e-5
    assert single.mean < single.p90 < 20 * single.mean
    assert len(single.edges) == len(single.sigmas) == BINS
    assert list(single.edges) == sorted(single.edges)


def test_bf16_rounds_thousands_of_times_as_much(llama, passages, single):
    coarse = measure_floor(llama.model, passages, "bfloat16")
    assert coarse.mean > 1000 * single.mean


def test_the_floor_is_the_spread_of_the_variants_around_the_model(llama, passages, single):
    """Worked out again from scores alone, without the curve."""

    def outputs(rows):
        for passage, row in zip(passages, rows, strict=True):
            yield from row[passage.start - 1 :]

    ids = [list(passage.ids) for passage in passages]
    exact = np.array(list(outputs(llama.score(ids))))
    deviations = [
        np.array(list(outputs(teacher.score(ids)))) - exact
        for teacher in equivalent_teachers(llama.model, "float32")
    ]
    assert single.mean == pytest.approx(np.abs(deviations).mean(), rel=0.2)


def test_a_few_tokens_have_a_curve_of_as_many_points(llama):
    short = measure_floor(llama.model, [Passage((5, 6, 7, 8), 2)], "float32")
    assert (short.num_tokens, len(short.edges)) == (2, 2)


def test_sigma_is_read_off_the_curve():
    floor = Floor("float32", 8, 4, 1e-3, 1e-3, (-8.0, -4.0, 0.0), (4e-3, 2e-3, 1e-3))
    sigma = floor.sigma(np.array([-8.0, -6.0, -4.0, -1.0, 0.0]))
    assert sigma == pytest.approx([4e-3, 3e-3, 2e-3, 1.25e-3, 1e-3])
    # Beyond the last point it stays at it: rare tokens have no smaller error than those that were measured.
    assert floor.sigma(np.array([-50.0])) == pytest.approx([4e-3])


def test_no_number_is_better_than_the_format_it_is_reported_in():
    exact = Floor("float32", 8, 4, 0.0, 0.0, (-8.0, 0.0), (0.0, 0.0))
    assert exact.sigma(np.array([0.0, -0.5, -8.0])) == pytest.approx(REPORT_EPSILON * np.array([1, 1, 8]))


@pytest.mark.parametrize(("given", "chosen"), [(4, 4), (6, 6), (64, 8), (255, 32), (512, 32), (10_000, 33)])
def test_the_floor_is_measured_on_some_of_the_sequences(given, chosen):
    """One in eight, from first to last, and no more than it takes."""
    some = some_of(range(given))
    assert len(some) == chosen
    assert some[0] == 0
    assert some[-1] >= given - max(1, given // chosen) - 1


@pytest.mark.parametrize("temperature", [0.3, 0.5, 1.0, 1.5])
def test_a_healthy_engine_in_bf16_passes_every_gate_at_any_temperature(llama, temperature):
    """At 0.5 its k3 of 0.0025 failed a gate of 0.002 that the floor did not move, and at 0.3 the mean did."""
    table, gates = audited_in_bf16(llama, temperature)
    assert compare(table, gates, np.random.default_rng(0)).outcome is Outcome.PASS


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("fault", ["temperature", "one in fifty", "shifted"])
def test_a_fault_in_bf16_is_still_caught(llama, temperature, fault):
    table, gates = audited_in_bf16(llama, temperature)
    reported = table.reported.copy()
    if fault == "temperature":
        reported *= 0.8
    elif fault == "shifted":
        reported = np.roll(reported, 1)
    else:
        reported[::50] = reported[1::50][: len(reported[::50])] - 2.0
    wrong = dataclasses.replace(table, reported=reported)
    assert compare(wrong, gates, np.random.default_rng(0)).outcome is Outcome.FAIL


@cache
def audited_in_bf16(llama: ReferenceBackend, temperature: float) -> tuple[TokenTable, Gates]:
    engine = ReferenceBackend("testbed:llama", dtype="bfloat16")
    rng = np.random.default_rng(3)
    requests = [
        Request(
            Prompt(tuple(rng.integers(4, 500, 12).tolist())),
            SamplingParams(temperature=temperature, max_tokens=24, seed=number),
        )
        for number in range(24)
    ]
    answers = zip(requests, engine.generate(requests), strict=True)
    observed = [Observed(answer.completions[0], request.sampling) for request, answer in answers]
    some = some_of(observed)
    floor = measure_floor(
        llama.model,
        [item.passage for item in some],
        "bfloat16",
        sampled_with=[item.requested for item in some],
    )
    table = tabulate(measure(llama.teacher, observed, llama.facts.eos_token_ids), floor)
    return table, gates_for(PROFILES[Precision.BF16].gate, floor)

from typing import Any

import numpy as np
import pytest
import torch

from zerodrift.audit import measure as measuring
from zerodrift.audit.measure import Measurement, Observed, measure, tabulate
from zerodrift.backends import teacher as teaching
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift import tokens
from zerodrift.drift.tokens import no_masses

PROMPT = (0, 20, 30)
OUTPUT = (40, 50, 60, 70)


def one(teacher: Any, completion: Completion, stop_ids: tuple[int, ...] = (), **sampling: Any) -> Measurement:
    (measured,) = measure(teacher, [Observed(completion, SamplingParams(**sampling))], stop_ids)
    return measured


def rows(llama: ReferenceBackend) -> np.ndarray:
    """Logits that predict the output, by calling the model."""
    with torch.no_grad():
        return llama.model(torch.tensor([PROMPT + OUTPUT])).logits[0, len(PROMPT) - 1 : -1].numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def test_numbers_are_those_of_numpy(llama, completion):
    told = (-1.0, -2.0, -3.0, -4.0)
    measured = one(llama.teacher, completion(PROMPT, OUTPUT, told), temperature=0.7)
    drawn = log_softmax(rows(llama) / 0.7)
    p = np.exp(drawn)
    entropy = -(p * drawn).sum(-1)
    places = np.arange(4), np.array(OUTPUT)
    np.testing.assert_allclose(measured.contracted, drawn[places], rtol=1e-9)
    np.testing.assert_allclose(measured.raw, log_softmax(rows(llama))[places], rtol=1e-9)
    np.testing.assert_allclose(measured.entropy, entropy, rtol=1e-9)
    np.testing.assert_allclose(measured.variance, (p * (drawn + entropy[:, None]) ** 2).sum(-1), rtol=1e-9)
    np.testing.assert_allclose(measured.delta, drawn[places] - told, rtol=1e-9)
    assert measured.reported.tolist() == list(told)


def test_what_the_request_excludes_has_no_probability(llama, completion):
    logits = rows(llama)
    likeliest = logits.argmax(-1)
    output = (int(likeliest[0]), *OUTPUT[1:])
    assert OUTPUT[1] != likeliest[1]
    measured = one(llama.teacher, completion(PROMPT, output), top_k=1)
    assert measured.contracted[0] == 0.0
    assert measured.contracted[1] == -np.inf
    assert measured.delta[1] == -np.inf
    # Nothing is 0 · log 0 = NaN: the whole mass is on one token.
    assert measured.entropy.tolist() == measured.variance.tolist() == [0.0] * 4
    assert np.isfinite(measured.raw).all()


def test_stop_tokens_are_forbidden_below_the_minimum(llama, completion):
    stop = (40,)
    measured = one(llama.teacher, completion(PROMPT, OUTPUT), stop, min_tokens=1, max_tokens=4)
    assert measured.contracted[0] == -np.inf
    assert np.isfinite(measured.contracted[1:]).all()


def test_an_engine_in_fp32_is_measured_as_it_reported(llama):
    """A healthy engine: what it says and what the reference makes of it agree to rounding."""
    engine = ReferenceBackend("testbed:llama", dtype="float32")
    params = SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.5, max_tokens=8, seed=1)
    (completion,) = engine.generate([Request(Prompt(PROMPT), params)])[0].completions
    (measured,) = measure(llama.teacher, [Observed(completion, params)], llama.facts.eos_token_ids)
    assert np.abs(measured.delta).max() < 1e-4
    narrow = one(engine.teacher, completion, temperature=0.7, top_p=0.9, presence_penalty=0.5)
    assert narrow.contracted.dtype == np.float64


def test_progress_counts_tokens_and_order_is_kept(llama, completion):
    seen: list[tuple[int, int]] = []
    observed = [Observed(completion(PROMPT, OUTPUT[:length]), SamplingParams()) for length in (1, 4, 2)]
    measured = measure(llama.teacher, observed, (), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 7), (3, 7), (7, 7)], "the shortest is scored first"
    assert [item.observed for item in measured] == observed


def test_rows_measured_in_parts_are_rows_measured_at_once(llama, completion, monkeypatch):
    """Penalties and the minimum look back over the edge of a part."""
    params = SamplingParams(
        temperature=0.7,
        top_p=0.95,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        min_tokens=9,
        max_tokens=24,
    )
    outputs = [tuple(20 + (7 * place + size) % 30 for place in range(size)) for size in (23, 1, 8, 24, 5)]
    observed = [Observed(completion(PROMPT, output), params) for output in outputs]
    whole = measure(llama.teacher, observed, (25, 41))
    monkeypatch.setattr(measuring, "CELLS", 3 * 512)
    monkeypatch.setattr(measuring, "WINDOW", 2)
    monkeypatch.setattr(teaching, "ROWS_BYTES", 7 * 512 * 8)
    parts = measure(llama.teacher, observed, (25, 41))
    assert parts.ends.tolist() == whole.ends.tolist() == [0, 23, 24, 32, 56, 61]
    np.testing.assert_allclose(parts.columns, whole.columns, rtol=1e-11, atol=1e-13)
    assert np.isneginf(parts.columns[0]).any(), "a stop token below the minimum"


def test_measurements_are_views_of_columns(llama, floor, completion):
    observed = [Observed(completion(PROMPT, OUTPUT[:length]), SamplingParams()) for length in (1, 4, 2)]
    measured = measure(llama.teacher, observed, ())
    assert len(measured) == 3
    assert [item.observed for item in measured[1:]] == observed[1:]
    assert measured[-1].observed is observed[2]
    assert measured[1].raw.tolist() == measured.columns[1, 1:5].tolist()
    shared, copied = tabulate(measured, floor), tabulate(list(measured), floor)
    assert np.shares_memory(shared.by_id, measured[1].by_id)
    for name, column in {**copied.columns, **vars(copied.masses)}.items():
        other = {**shared.columns, **vars(shared.masses)}[name]
        assert np.array_equal(column, other), name


def test_columns_of_every_token(floor, completion):
    items = [
        Measurement(
            Observed(completion((1, 2, 3), (7, 8), (-1.0, -2.0)), SamplingParams()),
            *[np.array([-1.5, -np.inf])] * 2,
            np.array([1.0, 2.0]),
            np.array([3.0, 4.0]),
            np.array([0.3, 0.4]),
            np.array([0.5, 0.6]),
            no_masses(2, 9),
        ),
        Measurement(
            Observed(completion((1,), (9,), (-3.0,)), SamplingParams()),
            *[np.array([-3.0])] * 2,
            np.array([5.0]),
            np.array([6.0]),
            np.array([0.7]),
            np.array([0.8]),
            no_masses(1, 9),
        ),
    ]
    table = tabulate(items, floor)
    assert table.sequence.tolist() == [0, 0, 1]
    assert table.index.tolist() == [0, 1, 0]
    assert table.position.tolist() == [3, 4, 1]
    assert table.token.tolist() == [7, 8, 9]
    assert table.reported.tolist() == [-1.0, -2.0, -3.0]
    assert table.delta.tolist() == [-0.5, -np.inf, 0.0]
    assert table.entropy.tolist() == [1.0, 2.0, 5.0]
    assert table.variance.tolist() == [3.0, 4.0, 6.0]
    assert table.by_likelihood.tolist() == [0.3, 0.4, 0.7]
    assert table.by_id.tolist() == [0.5, 0.6, 0.8]
    # An excluded token has the rounding of a rare one: finite, so that it can be counted.
    assert table.sigma == pytest.approx(floor.sigma(np.array([-1.5, -100.0, -3.0])))


class Told:
    """A teacher that says the same logits for every token."""

    def __init__(self, *logits: float) -> None:
        self.row_V = torch.tensor(logits, dtype=torch.float64)

    def logit_rows(self, sequences: Any, starts: Any) -> Any:
        for index, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
            yield teaching.LogitRows(index, 0, self.row_V.expand(len(ids) - start, -1))


PROBABILITIES = np.array([0.5, 0.3, 0.15, 0.05])


@pytest.mark.parametrize(
    ("sampling", "off"),
    [
        ({"top_p": 0.8}, {}),
        ({"top_k": 2}, {2: 0.3 * (1 - 1e-7)}),
        ({"min_p": 0.6}, {}),
    ],
    ids=["top-p", "top-k", "min-p"],
)
def test_at_the_edge_of_a_nucleus_either_side_is_right(completion, sampling, off):
    """0.5 + 0.3 is 0.8, a tie is nearly one, and 0.3 is 0.6 times 0.5: rounding decides whether the next one is kept."""
    chances = PROBABILITIES.copy()
    for token, chance in off.items():
        chances[token] = chance
    chances /= chances.sum()
    teacher = Told(*np.log(chances))
    fewer, more = {
        "top_p": (0.8, 0.95),
        "top_k": (chances[:2].sum(), chances[:3].sum()),
        "min_p": (0.5, 0.8),
    }[next(iter(sampling))]
    first = float(chances[0])
    for mass in (fewer, more):
        measured = one(teacher, completion((0,), (0,), (float(np.log(first / mass)),)), **sampling)
        assert abs(measured.delta[0]) < 1e-9, mass
    # Anywhere else it is wrong.
    measured = one(teacher, completion((0,), (0,), (float(np.log(first)),)), **sampling)
    assert abs(measured.delta[0]) > 0.01


def test_away_from_the_edge_it_is_not(completion):
    teacher = Told(*np.log(PROBABILITIES))
    for top_p in (0.79, 0.81):
        kept = 0.8 if top_p < 0.8 else 0.95
        other = 0.8 + 0.95 - kept
        (wrong,) = one(teacher, completion((0,), (0,), (float(np.log(0.5 / other)),)), top_p=top_p).delta
        assert abs(wrong) > 0.1


def test_draws_beyond_what_is_counted_have_no_masses(llama, floor, completion, monkeypatch):
    """The first five of seven tokens, whether they come as one array or sequence by sequence."""
    monkeypatch.setattr(tokens, "COUNTED", 5)
    observed = [Observed(completion(PROMPT, OUTPUT[:length]), SamplingParams()) for length in (2, 4, 1)]
    measured = measure(llama.teacher, observed, ())
    assert [len(item.masses.stop) for item in measured] == [2, 3, 0]
    for table in (tabulate(measured, floor), tabulate(list(measured), floor)):
        assert len(table.token) == 7
        assert table.counted.token.tolist() == [*OUTPUT[:2], *OUTPUT[:3]]
        assert len(table.rows(table.index == 0).counted.token) == 2

"""The probes against an engine that is played by the test: equal bits, small gaps, large gaps, and no answer at all."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from zerodrift.audit.probes.consistency import SelfConsistency
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.backends.base import Capability
from zerodrift.core.completion import Answer
from zerodrift.core.errors import BadAnswer
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift.gates import Gates
from zerodrift.records.verdict import Outcome

REQUESTS = [Request(Prompt((10 + row, 4, 5)), SamplingParams(max_tokens=4, seed=row)) for row in range(4)]
OUTPUT = (7, 8, 9, 10)
Told = Callable[[Request, int, int], Sequence[float]]
"""(request, number of the call, requests in the call) to logprobs."""


@pytest.fixture
def engine(scripted, completion):
    """Reports `told`, and gives `output` for every request."""

    def build(told, output=None, **options):
        def answer(request, number):
            tokens = OUTPUT if output is None else output(request, number)
            values = told(request, number, played.batches[-1])
            fields = {"cached_tokens": options.get("cached", lambda _: 0)(number)}
            return Answer((completion(request.prompt.token_ids, tokens, values[: len(tokens)], **fields),))

        played = scripted(answer, **{k: v for k, v in options.items() if k != "cached"})
        return played

    return build


def steady(request: Request, number: int, together: int) -> Sequence[float]:
    return (-1.0, -2.0, -3.0, -4.0)


def off_by(gap: float, when: Callable[[int, int], bool]) -> Told:
    def told(request: Request, number: int, together: int) -> Sequence[float]:
        shift = gap if when(number, together) else 0.0
        return tuple(value - shift for value in steady(request, number, together))

    return told


class Truth:
    """A reference that scores like the engine's decoding does, unless told otherwise."""

    def __init__(self, value: float = -1.0) -> None:
        self.value = value

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[self.value] * (len(ids) - 1) for ids in sequences]


def run(name: str, engine: Any, gates: Gates, requests: Sequence[Request] = REQUESTS) -> ProbeResult:
    return getattr(SelfConsistency(engine, Truth(), requests, gates, "salt"), name)()


# When the other look is taken: after the first pass of four; in the call of four; in the second of two passes.
SECOND = {
    "repeat": lambda number, together: number >= 4,
    "batch": lambda number, together: together == 4,
    "cache": lambda number, together: number % 8 >= 4,
}
CAUSE = {"repeat": "path/nondeterminism", "batch": "path/batch-variance", "cache": "path/prefix-cache"}
COMPARED = {"repeat": 8, "batch": 16, "cache": 16}
"""Tokens; half of the requests are repeated."""
HITS = {"cached": lambda number: 2 if number % 8 >= 4 else 0}


@pytest.mark.parametrize("name", list(SECOND))
def test_equal_bits_pass(engine, gates, name):
    result = run(name, engine(steady, **HITS), gates)
    assert result.record.name == name
    assert result.record.status is Outcome.PASS
    assert result.causes == ()
    assert (result.record.evidence["tokens"], result.record.evidence["mean"]) == (COMPARED[name], 0.0)
    assert result.record.evidence.get("cached_tokens") == (8 if name == "cache" else None)


@pytest.mark.parametrize("name", list(SECOND))
@pytest.mark.parametrize(("gap", "gating"), [(1e-6, False), (1e-3, True)])
def test_a_difference_is_listed_and_gates_above_the_gate(engine, gates, name, gap, gating):
    result = run(name, engine(off_by(gap, SECOND[name]), **HITS), gates)
    asked_once_more = gating and name != "repeat"
    assert result.record.evidence.get("changed") == (0 if asked_once_more else None)
    assert result.record.status is (Outcome.FAIL if gating else Outcome.PASS)
    (cause,) = result.causes
    assert (cause.cause, cause.gating, cause.explained) == (CAUSE[name], gating, 1.0)
    assert result.record.evidence["mean"] == pytest.approx(gap)
    assert result.record.evidence["max"] == pytest.approx(gap)
    assert result.record.evidence["differing"] == COMPARED[name]


@pytest.mark.parametrize("name", ["batch", "cache"])
@pytest.mark.parametrize("side", ["first", "second"])
def test_what_comes_and_goes_is_not_the_comparisons(engine, gates, name, side):
    """One wrong number in the whole probe, whichever side it falls on, and never again."""
    one = 1 if side == "first" else 6
    played = engine(off_by(1e-3, lambda number, together: number == one), **HITS)
    result = run(name, played, gates)
    (cause,) = result.causes
    assert (cause.cause, cause.gating) == ("path/nondeterminism", True)
    assert result.record.evidence["changed"] == 1


@pytest.mark.parametrize("name", ["batch", "cache"])
def test_what_starts_in_the_middle_is_not_the_comparisons(engine, gates, name):
    result = run(name, engine(off_by(1e-3, lambda number, together: number >= 5), **HITS), gates)
    assert result.causes[0].cause == "path/nondeterminism"


@pytest.mark.parametrize(("said", "right"), [(-1.0, True), (-1.5, False)])
def test_the_reference_says_whether_answers_alone_are_right(engine, gates, said, right):
    def told(request, number, together):
        return (said if together == 1 else -2.0,) * 4

    result = run("batch", engine(told), gates)
    assert result.causes[0].cause == "path/batch-variance"
    assert result.record.evidence["alone_is_right"] is right


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("repeat", Capability.SEED),
        ("batch", Capability.SEED),
        ("cache", Capability.SEED),
        ("cache", Capability.CACHE_SALT),
        ("cache", Capability.CACHED_TOKENS),
    ],
)
def test_what_the_engine_cannot_do_is_not_judged(engine, gates, name, lacks):
    played = engine(steady, capabilities=frozenset(Capability) - {lacks})
    result = run(name, played, gates)
    assert result.record.status is Outcome.INCONCLUSIVE
    assert "seed" in result.record.message or lacks.value in result.record.message
    assert played.asked == []


@pytest.mark.parametrize(
    "cached",
    [lambda number: 0, lambda number: None, lambda number: 2],
    ids=["never", "unsaid", "already at the first time"],
)
def test_a_cache_that_was_not_hit_or_not_cold_is_vacuous(engine, gates, cached):
    result = run("cache", engine(steady, cached=cached), gates)
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)


def salts(played: Any) -> list[str | None]:
    return [request.prompt.cache_salt for request in played.asked]


def test_salts_keep_caches_cold_where_they_should_be(engine, gates):
    for name, asked in (("repeat", 6), ("batch", 8)):
        played = engine(steady)
        run(name, played, gates)
        assert len(set(salts(played))) == asked, "no salt is used twice"
    played = engine(steady, **HITS)
    run("cache", played, gates)
    assert salts(played)[:4] == salts(played)[4:]
    assert len(set(salts(played))) == 4, "one request does not warm the cache of another"
    played = engine(steady, capabilities=frozenset({Capability.SEED}))
    run("repeat", played, gates)
    assert set(salts(played)) == {None}, "an engine without salts gets none"


def test_batches_form_and_singles_are_single(engine, gates):
    played = engine(steady)
    run("batch", played, gates)
    assert sorted(played.batches) == [1, 1, 1, 1, 4]
    played = engine(steady)
    run("repeat", played, gates)
    assert played.batches == [1] * 6


@pytest.mark.parametrize("name", list(SECOND))
def test_no_usable_sample_is_a_bad_answer(scripted, gates, name):
    with pytest.raises(BadAnswer, match="no usable sample"):
        run(name, scripted(lambda request, number: Answer(())), gates)


# --- prefill and decode -----------------------------------------------------------------------------------------


def ones(request: Request, number: int, together: int) -> Sequence[float]:
    return (-1.0,) * 4


def prefill_decode(
    played: Any, gates: Gates, truth: Truth, requests: Sequence[Request] = REQUESTS
) -> ProbeResult:
    return SelfConsistency(played, truth, requests, gates, "salt").prefill_decode()


@pytest.mark.parametrize(
    ("decoded", "scored", "right", "gap"),
    [(-1.0, -1.0, True, 0.0), (-1.25, -1.0, True, 0.25), (-1.25, -1.5, False, 0.25)],
)
def test_the_reference_says_which_of_decode_and_prefill_is_right(engine, gates, decoded, scored, right, gap):
    played = engine(lambda *_: (decoded,) * 4, scores=lambda ids: [scored] * (len(ids) - 1))
    result = prefill_decode(played, gates, Truth(-1.0))
    assert result.status is (Outcome.FAIL if gap else Outcome.PASS)
    assert [cause.cause for cause in result.causes] == ["path/prefill-decode"] * bool(gap)
    evidence = result.record.evidence
    assert (evidence["tokens"], evidence["mean"], evidence["prefill_is_right"]) == (16, gap, right)


def test_what_every_probe_compares_with_is_asked_for_once(engine, gates):
    played = engine(ones)
    itself = SelfConsistency(played, Truth(), REQUESTS, gates, "salt")
    itself.repeat()
    itself.batch()
    itself.prefill_decode()
    assert sorted(played.batches) == [1] * 6 + [4]


def test_an_engine_that_cannot_score_is_not_judged(engine, gates):
    played = engine(ones, capabilities=frozenset(Capability) - {Capability.SCORE})
    result = prefill_decode(played, gates, Truth())
    assert result.record.status is Outcome.INCONCLUSIVE
    assert "does not score" in result.record.message


def test_nothing_was_decoded(engine, gates):
    result = prefill_decode(engine(lambda *_: (), lambda *_: ()), gates, Truth())
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)
    assert np.isfinite([v for v in result.record.evidence.values() if isinstance(v, float)]).all()


@pytest.mark.parametrize("name", list(SECOND))
def test_numbers_that_differ_before_tokens_part_are_a_finding(engine, gates, name):
    """A cache that is read wrongly changes the first logprob, and the second token."""
    broken = engine(off_by(1e-3, SECOND[name]), lambda request, number: (7, 100 + number, 101, 102), **HITS)
    result = run(name, broken, gates)
    assert result.record.status is Outcome.FAIL
    assert [cause.cause for cause in result.causes] == [CAUSE[name]]


@pytest.mark.parametrize("name", list(SECOND))
@pytest.mark.parametrize("first", [7, None], ids=["the first token alone is the same", "nothing is"])
def test_an_engine_that_ignores_seeds_agrees_with_nothing(engine, gates, name, first):
    """Too little in common is no ground for `every bit equal`."""
    anew = engine(steady, lambda request, number: (first or number, 100 + number, 101, 102), **HITS)
    result = run(name, anew, gates)
    assert (result.status, result.vacuous) == (Outcome.INCONCLUSIVE, True)


@pytest.mark.parametrize(
    ("second", "told", "tokens", "largest"),
    [
        # Tokens after a different one are not compared; a shorter output as far as it goes.
        ((7, 8, 11, 10), (-1.0, -2.5, -30.0, -40.0), 4, 0.5),
        (OUTPUT[:3], (-1.0, -2.0, -3.0), 6, 0.0),
    ],
)
def test_tokens_that_both_have_are_compared(engine, gates, second, told, tokens, largest):
    played = engine(
        lambda request, number, together: (-1.0, -2.0, -3.0, -4.0) if number < 4 else told,
        lambda request, number: OUTPUT if number < 4 else second,
    )
    evidence = run("repeat", played, gates).record.evidence
    assert (evidence["tokens"], evidence["max"]) == (tokens, largest)

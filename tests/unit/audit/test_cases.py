"""Which tokens attribution looks at: the worst, and enough that chance has chosen."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from zerodrift.audit.cases import affordable, choose_cases
from zerodrift.audit.counterfactual.evaluate import CaseWindow
from zerodrift.audit.measure import Measurement, Observed
from zerodrift.core.completion import Completion, FinishReason
from zerodrift.core.request import SamplingParams
from zerodrift.drift.tokens import no_masses

Make = Callable[..., Completion]
REQUESTED = SamplingParams(temperature=0.7, max_tokens=16)


@pytest.fixture
def choose(completion, floor, gates):
    """From sequences whose tokens are off by so much; the second prompt token is their number."""

    def run(deltas, budget, seed=0):
        items = [_measured(completion, number, each) for number, each in enumerate(deltas)]
        return choose_cases(items, floor, gates, budget, np.random.default_rng(seed))

    return run


def _measured(completion: Make, number: int, deltas: Sequence[float]) -> Measurement:
    contracted = np.full(len(deltas), -1.0)
    output = tuple(range(10, 10 + len(deltas)))
    said = completion(
        (1, number),
        output,
        (contracted - np.nan_to_num(deltas, posinf=0.0)).tolist(),
        finish_reason=FinishReason.STOP,
    )
    contracted = np.where(np.isinf(deltas), -np.inf, contracted)
    return Measurement(
        Observed(said, REQUESTED),
        contracted,
        contracted,
        *[np.ones(len(deltas))] * 4,
        no_masses(len(deltas), 9),
    )


def numbers(cases: Sequence[CaseWindow]) -> list[int]:
    return [case.prompt[1] for case in cases]


def by_chance(cases: Sequence[CaseWindow]) -> list[int]:
    return numbers([case for case in cases if case.at_random])


@pytest.mark.parametrize("length", [32, 128, 256, 2000])
@pytest.mark.parametrize("budget", [200, 240, 1000])
def test_twenty_sequences_are_chosen_by_chance_however_long_they_are(choose, length, budget):
    cases = choose([[1e-3] * length] * 64, budget)
    chance = by_chance(cases)
    assert len(set(chance)) == len(chance) >= 20
    assert sum(len(case.judged) for case in cases) <= budget + budget // 10


def test_chance_does_not_know_what_is_off(choose):
    """Half of the sequences are off: of those chosen by chance as many, and the worst are all off."""
    deltas = [[1e-3 * (number % 2)] * 128 for number in range(100)]
    shares, worst = [], set[int]()
    for seed in range(40):
        cases = choose(deltas, 240, seed)
        shares.append(np.mean([number % 2 for number in by_chance(cases)]))
        worst |= {case.prompt[1] % 2 for case in cases if not case.at_random}
    assert np.mean(shares) == pytest.approx(0.5, abs=0.06)
    assert worst == {1}


def test_a_window_chosen_by_chance_may_be_any(choose):
    """Every token is as likely as any other, the last no less than the first."""
    begins = [
        case.before for seed in range(40) for case in choose([[0.0] * 100] * 30, 240, seed) if case.at_random
    ]
    assert min(begins) == 0
    assert max(begins) >= 100 - 8
    assert np.mean(begins) == pytest.approx(46, abs=3)


def test_a_window_holds_what_was_seen_in_it_and_the_whole_context(choose):
    deltas = [0.0] * 100
    deltas[40:44] = [1e-2] * 4
    case = choose([deltas] + [[0.0] * 100] * 29, 240)[0]
    assert case.prompt == (1, 0)
    assert case.before <= 40 < case.before + len(case.judged)
    assert case.output == tuple(range(10, 10 + case.before + len(case.judged)))
    assert len(case.reported) == len(case.sigma) == len(case.judged) <= 8
    off = 40 - case.before
    assert case.reported[off] == pytest.approx(-1.01)
    assert not case.stopped, "the stop lies beyond the window"


def test_the_end_of_an_output_is_in_its_last_window_only(choose):
    for seed in range(5):
        for case in choose([[0.0] * 100] * 30, 240, seed):
            assert case.stopped is (len(case.output) == 100)


def test_the_worst_come_first(choose):
    deltas = [[0.0] * 10 for _ in range(40)]
    deltas[17], deltas[31] = [1e-5] * 10, [2e-5] * 10
    for seed in range(5):
        # Both windows of one may be chosen: its worst, and one by chance.
        assert list(dict.fromkeys(numbers(choose(deltas, 120, seed))))[:2] == [31, 17]


def test_one_token_that_is_off_is_seen_in_a_long_output(choose):
    """An end of sequence without its logprob: one token of 256, in one sequence of 60."""
    deltas = [[0.0] * 256 for _ in range(60)]
    deltas[42][-1] = 2.0
    for seed in range(5):
        case = choose(deltas, 240, seed)[0]
        assert (case.prompt[1], len(case.output)) == (42, 256)


def test_everything_is_looked_at_where_it_fits_and_all_of_it_is_chance(choose):
    cases = choose([[0.1] * 10, [0.2] * 10, [0.3] * 10], 1000)
    assert sorted(numbers(cases)) == [0, 1, 2]
    assert all(case.at_random and case.before == 0 and len(case.output) == 10 for case in cases)


def test_few_sequences_get_wide_windows(choose):
    cases = choose([[0.1] * 300] * 2, 240)
    assert set(by_chance(cases)) == {0, 1}
    assert min(len(case.judged) for case in cases) >= 70


def test_one_sequence_is_all_there_is(choose):
    assert set(numbers(choose([[0.1] * 300], 240))) == {0}


def test_wild_tokens_count_as_fifty(choose):
    """One excluded token must not outweigh a sequence that is wrong throughout."""
    for seed in range(5):
        cases = choose([[np.inf] + [0.0] * 9, [1e-3] * 10, [0.0] * 10], 30, seed)
        assert cases[0].prompt[1] == 1


def test_a_case_holds_what_was_seen(completion, floor, gates):
    seen = completion((1, 2), (3, 4), (-0.5, -0.25), finish_reason=FinishReason.STOP)
    values = np.array([-0.5, -np.inf])
    item = Measurement(Observed(seen, REQUESTED), values, values, *[np.ones(2)] * 4, no_masses(2, 9))
    (case,) = choose_cases([item], floor, gates, 100, np.random.default_rng(0))
    assert (case.prompt, case.output, case.requested) == ((1, 2), (3, 4), REQUESTED)
    assert case.reported.tolist() == [-0.5, -0.25]
    assert case.stopped
    assert case.at_random
    # A third of the gate is nothing that needs a cause.
    assert case.sigma[0] == pytest.approx(np.hypot(1e-6, gates.mean / 3), rel=0.01)
    assert np.isfinite(case.sigma).all()


@pytest.mark.parametrize(
    ("short", "long", "kept"),
    [
        ((24, 0.1), (4, 0.1), 24),
        ((24, 0.01), (4, 0.1), 28),  # the long ones are off: they are what is to be explained
        ((24, 0.0), (4, np.inf), 28),
        ((8, 0.1), (30, 0.1), 38),  # too few are short
    ],
)
def test_short_sequences_are_enough_where_they_are_off_as_all_are(completion, short, long, kept):
    items = [_measured(completion, number, [short[1]] * 20) for number in range(short[0])]
    items += [_measured(completion, number, [long[1]] * 400) for number in range(long[0])]
    assert len(affordable(items)) == kept

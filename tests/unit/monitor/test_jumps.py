"""One batch that is far off in one cell: a fault, or a few tokens that say the same thing four times?"""

import numpy as np
import pytest

from zerodrift.monitor.cells import Expected, _cell, _Rows
from zerodrift.monitor.tracks import JUMP_Z, Track, as_normal, jumped

SAMPLES, TOKENS = 4, 64
FIRST = np.array([4.48e-5, 4.28e-6, 6.2e-6, 2.19e-5])
"""Σ|Δ| of the first tokens of four prompts, as a healthy training on vLLM 0.32 in fp32 showed them at its step 11. Three of four
samples of the first prompt begin with the same token, and so with the same 1.2e-5."""
USUAL = np.array([2.1e-5, 2.4e-6, 2.6e-6, 1.25e-5])
"""What tokens as likely as these show: the second and third prompt's are certain, the first's have p = 0.3."""
WHOLE = np.array([4.92e-4, 4.19e-4, 3.13e-4, 4.28e-4])


def cell(kind, label, tokens, size, expected):
    count = np.full(len(size), float(tokens))
    return _cell(kind, label, _Rows(count, np.zeros(len(size)), size, expected), lambda _: Expected(0.0, 1.0))


def whole(size):
    return cell("all", "all", SAMPLES * TOKENS, size, np.full(len(size), 4.13e-4))


def test_four_samples_of_one_first_token_are_no_fault():
    first = cell("position", "first", SAMPLES, FIRST, USUAL)
    assert first.against_baseline == pytest.approx(2.0, abs=0.05)
    assert jumped(first, whole(WHOLE), 1.0) is None


def test_first_tokens_that_are_off_in_every_prompt_are_one():
    """The control: sixteen prompts, each at three times what is usual, and the rest of the outputs as healthy as above."""
    first = cell("position", "first", SAMPLES, 3 * np.tile(USUAL, 4), np.tile(USUAL, 4))
    found = jumped(first, whole(np.tile(WHOLE, 4)), 1.0)
    assert found is not None
    assert found.times == pytest.approx(3.0)


def test_whole_sequences_borrow_their_spread_as_before():
    """Of a replica that has half of the prompts, half of the variance."""
    everything = whole(np.tile(WHOLE, 2))
    half = cell("replica", "0", SAMPLES * TOKENS, WHOLE, np.full(4, 4.13e-4))
    assert half._part_of(everything) == pytest.approx(0.5)


def test_a_part_of_each_sequence_is_as_steady_as_its_tokens_are_many():
    first = cell("position", "first", SAMPLES, FIRST, np.full(4, 4.13e-4 / TOKENS))
    assert first._part_of(whole(WHOLE)) == pytest.approx(1 / TOKENS)


@pytest.mark.parametrize(
    ("t", "freedom", "z"), [(4, 3, 2.197), (-4, 7, -2.795), (8, 15, 4.921), (4, 63, 3.761)]
)
def test_few_units_are_less_sure(t, freedom, z):
    assert as_normal(t, freedom) == pytest.approx(z, abs=0.05)


def test_what_has_no_spread_at_all_is_beyond_any_chance():
    assert as_normal(float("inf"), 3) > JUMP_Z


def test_a_chart_takes_the_z_of_four_prompts_for_students_t():
    """Four times its standard deviation, by a spread that is known from four prompts: 2.2 of a normal's, less the allowance."""
    everything = whole(WHOLE)
    off = cell("replica", "0", SAMPLES * TOKENS, WHOLE, np.full(4, 4.13e-4))
    t = off.z(everything)[2]
    track = Track.start("replica", Expected(0.0, 1.0)).update(off, everything)
    assert track.charts[2].last == pytest.approx(as_normal(t, 3))
    assert abs(track.charts[2].last) < abs(t)


def test_of_many_prompts_it_stays_nearly_what_it_is():
    many = np.tile(WHOLE * 1.05, 16)
    everything = whole(many)
    track = Track.start("all", Expected(0.0, 1.0)).update(everything, everything)
    assert track.charts[2].last == pytest.approx(everything.z(everything)[2], rel=0.05)


def test_what_is_nothing_beside_the_whole_is_no_jump():
    """Sixteen prompts of an environment whose tokens are certain: three times a thousandth of what others show."""
    everything = whole(np.tile(WHOLE, 4))
    usual = np.full(16, 4.13e-7)
    assert jumped(cell("environment", "chat", SAMPLES * TOKENS, 3 * usual, usual), everything, 1.0) is None


def test_nor_does_a_bias_that_small_move_a_chart():
    everything = whole(np.tile(WHOLE, 4))
    count, usual = np.full(16, 256.0), np.full(16, 4.13e-7)
    sure = np.linspace(0.9, 1.1, 16)
    for share, moves in ((0.5, False), (2000.0, True)):
        rows = _Rows(count, share * usual * sure, usual, usual)
        certain = _cell("log p", "p>0.99", rows, lambda _: Expected(0.0, 1.0))
        track = Track.start("log p", Expected(0.0, 1.0)).update(certain, everything)
        assert (track.charts[0].cusum.score > 0) is moves


def test_a_bias_learned_from_one_loud_batch_is_not_held_against_quiet_ones():
    """Nine batches at 0 and one at 1: their mean is 0.1, with an error as large."""
    track = Track.start("environment", Expected(0.0, 1.0))
    usual, sure = np.full(16, 4.13e-4), np.linspace(-1e-6, 1e-6, 16)

    def batch(bias):
        rows = _Rows(np.full(16, 256.0), 256 * bias + sure, usual, usual)
        return _cell("environment", "chat", rows, lambda _: track.expected)

    for number in range(10):
        track = track.follow(batch(1e-4 if number == 4 else 0.0), 1)
    assert track.bias == pytest.approx(1e-5)
    assert track.unsure == pytest.approx(1e-5)
    quiet = batch(0.0)
    assert abs(quiet.z(whole(np.tile(WHOLE, 4)), track.unsure)[1]) < 1.01
    assert quiet.z(whole(np.tile(WHOLE, 4)))[1] > 4


def test_eight_prompts_of_which_one_has_every_uncertain_token_are_one():
    """A policy that has all but collapsed: where all that is expected, and all that is seen, is in one prompt, there is no spread."""
    expected = np.array([0.05, *[1e-7] * 7])
    everything = cell("all", "all", 128, 3 * expected, expected)
    assert everything.effective == pytest.approx(1.0, abs=1e-3)
    assert jumped(everything, everything, 1.0) is None
    even = np.full(8, 0.05)
    assert jumped(cell("all", "all", 128, 3 * even, even), cell("all", "all", 128, 3 * even, even), 1.0)

import numpy as np
import pytest

from zerodrift.view.plots import LOWEST_DECADE, signed_log_bins


def test_every_token_is_counted_in_the_bin_whose_range_holds_it() -> None:
    rng = np.random.default_rng(0)
    delta = rng.choice([-1, 1], 5000) * 10 ** rng.uniform(-5, 1, 5000)
    delta[:7] = 0
    bins = signed_log_bins(delta)
    assert sum(bins.counts) == 5000
    for (low, high), held in zip(bins.ranges, bins.counts, strict=True):
        # Edges are rounded logarithms: a value on one may fall to either side.
        inner = int(((delta > low * (1 + 1e-12)) & (delta < high * (1 - 1e-12))).sum())
        assert abs(inner - held) <= 1


def test_signs_fall_on_their_own_side() -> None:
    bins = signed_log_bins(np.array([-0.5, -0.5, 0.002, 0.0]))
    held = {centre: count for centre, count in zip(bins.centres, bins.counts, strict=True) if count}
    assert bins.least == pytest.approx(1e-3)
    assert held == {-27: 2, 0: 1, 4: 1}
    assert bins.reach == 27


def test_places_agree_with_the_bars() -> None:
    bins = signed_log_bins(np.array([0.001, -1.0, 5.0]))
    assert bins.place(0.0) == bins.place(bins.least / 2) == 0.0
    assert bins.place(bins.least) == 0.5
    assert bins.place(-0.01) == pytest.approx(-10.5)


def test_exact_zeros_and_dust_are_in_the_middle() -> None:
    assert signed_log_bins(np.zeros(3)).counts[10] == 3
    dust = signed_log_bins(np.array([1e-15, -1e-15, 1e-12]))
    assert dust.lowest_decade == LOWEST_DECADE
    assert dust.counts[10] == 3
    assert dust.reach == 0


def test_one_large_value_does_not_stretch_the_small_end() -> None:
    delta = np.concatenate((np.full(1000, 1e-2), [1e-8]))
    bins = signed_log_bins(delta)
    assert bins.lowest_decade == -2
    assert sum(bins.counts) == 1001

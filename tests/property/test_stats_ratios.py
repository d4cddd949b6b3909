import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zerodrift.stats import ratios
from zerodrift.stats.sequences import sequence_sums

steady = settings(deadline=None, max_examples=60)
log_ratios = hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-200, 200))
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@steady
@given(log_ratios, st.floats(-90, 90))
def test_ess_lies_between_one_sample_and_all_and_ignores_scale(r: np.ndarray, shift: float) -> None:
    ess = ratios.token_ess(r)
    assert 1 / r.size <= ess * (1 + 1e-12)
    assert ess <= 1
    np.testing.assert_allclose(ratios.token_ess(r + shift), ess, rtol=1e-9)
    np.testing.assert_allclose(ratios.token_ess(np.repeat(r, 3)), ess, rtol=1e-9)
    np.testing.assert_allclose(ratios.token_ess(r[::-1]), ess, rtol=1e-12)


@steady
@given(st.floats(-200, 200), st.integers(1, 50))
def test_equal_ratios_lose_nothing(level: float, count: int) -> None:
    assert ratios.token_ess(np.full(count, level)) == 1.0


@steady
@given(hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-20, 20)))
def test_ess_is_the_plain_formula_where_that_can_be_computed(r: np.ndarray) -> None:
    rho = np.exp(r)
    np.testing.assert_allclose(ratios.token_ess(r), rho.sum() ** 2 / (rho.size * (rho**2).sum()), rtol=1e-9)
    assert ratios.sequence_ess(r, np.arange(r.size)) == ratios.token_ess(r)


@steady
@given(lengths, st.randoms(use_true_random=False))
def test_sequence_ratios_do_not_depend_on_how_tokens_are_laid_out(sizes: list[int], random: object) -> None:
    ids = np.repeat(np.arange(len(sizes)), sizes)
    r = np.linspace(-2, 3, ids.size)
    order = np.arange(ids.size)
    random.shuffle(order)  # type: ignore[attr-defined]
    expected = [r[ids == sequence].sum() for sequence in range(len(sizes))]
    np.testing.assert_allclose(ratios.log_product_ratios(r[order], ids[order]), expected, atol=1e-12)
    assert sequence_sums(np.ones(ids.size), ids).tolist() == sizes


@steady
@given(
    hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-2, 2)), st.floats(0, 0.9), st.floats(0, 3)
)
def test_clip_fractions_are_shares_that_fall_as_bounds_widen(r: np.ndarray, low: float, high: float) -> None:
    narrow = ratios.clip_fraction(r, low=low, high=high)
    wide = ratios.clip_fraction(r, low=low + 0.05, high=high + 0.1)
    assert 0 <= wide.below <= narrow.below <= 1
    assert 0 <= wide.above <= narrow.above <= 1
    assert narrow.total <= 1 + 1e-12

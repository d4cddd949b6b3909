import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

from zerodrift.stats.kl import k3

steady = settings(deadline=None, max_examples=60)


@steady
@given(hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-50, 50)))
def test_k3_is_never_negative_and_zero_only_at_zero(r: np.ndarray) -> None:
    assert (k3(r) >= 0).all()
    # Below 1e-161 the square itself leaves float64.
    assert (k3(r)[np.abs(r) > 1e-150] > 0).all()


@steady
@given(hnp.arrays(np.float64, (2, 12), elements=st.floats(-30, 30)))
def test_the_mean_of_k3_is_the_kl_divergence(rows: np.ndarray) -> None:
    behaviour, target = special.log_softmax(rows, axis=1)
    exact = special.rel_entr(np.exp(behaviour), np.exp(target)).sum()
    np.testing.assert_allclose(np.exp(behaviour) @ k3(target - behaviour), exact, rtol=1e-7, atol=1e-12)

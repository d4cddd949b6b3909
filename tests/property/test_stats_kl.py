import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

from zerodrift.stats import kl

steady = settings(deadline=None, max_examples=60)
log_ratios = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-50, 50))
logits = hnp.arrays(np.float64, (2, 12), elements=st.floats(-30, 30))


@steady
@given(log_ratios)
def test_k2_and_k3_are_never_negative_and_zero_only_at_zero(r: np.ndarray) -> None:
    assert (kl.k2(r) >= 0).all()
    assert (kl.k3(r) >= 0).all()
    # Below 1e-161 the square itself leaves float64.
    assert (kl.k3(r)[np.abs(r) > 1e-150] > 0).all()
    assert (kl.k1(r) == -r).all()


@steady
@given(logits)
def test_the_unbiased_estimators_have_the_exact_kl_as_their_mean(rows: np.ndarray) -> None:
    behaviour, target = special.log_softmax(rows, axis=1)
    exact, p, r = float(kl.exact_kl(behaviour, target)), np.exp(behaviour), target - behaviour
    np.testing.assert_allclose(p @ kl.k1(r), exact, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(p @ kl.k3(r), exact, rtol=1e-9, atol=1e-12)


@steady
@given(logits)
def test_exact_kl_is_never_negative_zero_for_equals_and_blind_to_the_order_of_tokens(
    rows: np.ndarray,
) -> None:
    log_p, log_q = special.log_softmax(rows, axis=1)
    assert kl.exact_kl(log_p, log_q) >= 0
    assert kl.exact_kl(log_p, log_p) == 0
    np.testing.assert_allclose(kl.exact_kl(log_p[::-1], log_q[::-1]), kl.exact_kl(log_p, log_q), rtol=1e-12)


@steady
@given(logits, st.floats(0, 1))
def test_exact_kl_shrinks_towards_the_other_distribution(rows: np.ndarray, share: float) -> None:
    log_p, log_q = special.log_softmax(rows, axis=1)
    mixed = np.log((1 - share) * np.exp(log_p) + share * np.exp(log_q))
    # Convexity: KL(p || mix) <= share · KL(p || q).
    assert kl.exact_kl(log_p, mixed) <= share * kl.exact_kl(log_p, log_q) * (1 + 1e-9) + 1e-12

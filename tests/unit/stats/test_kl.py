from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy import special

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats import kl


def exact_k3(r: float) -> float:
    with localcontext() as context:
        context.prec = 800
        return float(Decimal(r).exp() - 1 - Decimal(r))


@pytest.mark.parametrize(
    "size", [1e-300, 1e-160, 1e-16, 1e-9, 1e-7, 1e-5, 9.99e-3, 1e-2, 1.001e-2, 0.3, 5.0, 200.0]
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_k3_is_exact_from_rounding_noise_to_disaster(size: float, sign: int) -> None:
    r = sign * size
    assert kl.k3([r])[0] == pytest.approx(exact_k3(r), rel=1e-13, abs=1e-320)


@pytest.mark.parametrize("size", [1.1e-4, 3e-4, 7e-4, 1e-3, 3e-3, 5.5e-3, 9.9e-3])
@pytest.mark.parametrize("sign", [-1, 1])
def test_small_k3_keeps_all_digits(size: float, sign: int) -> None:
    """exp(r) - 1 - r by subtraction has lost three of them at 1e-3."""
    assert kl.k3([sign * size])[0] == pytest.approx(exact_k3(sign * size), rel=5e-16, abs=0)


def test_the_three_estimators_by_hand() -> None:
    r = [0.0, np.log(2.0), -1.0]
    assert kl.k1(r).tolist() == [0.0, -np.log(2.0), 1.0]
    np.testing.assert_allclose(kl.k2(r), [0.0, np.log(2.0) ** 2 / 2, 0.5])
    np.testing.assert_allclose(kl.k3(r), [0.0, 1 - np.log(2.0), np.exp(-1)])


def test_exact_kl_by_hand() -> None:
    p, q = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert kl.exact_kl(np.log(p), np.log(q)) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))


def test_exact_kl_agrees_with_scipy_row_by_row() -> None:
    generator = np.random.default_rng(0)
    log_p, log_q = (special.log_softmax(generator.normal(size=(3, 4, 50)) * 3, axis=-1) for _ in range(2))
    expected = special.rel_entr(np.exp(log_p), np.exp(log_q)).sum(axis=-1)
    np.testing.assert_allclose(kl.exact_kl(log_p, log_q), expected, rtol=1e-12)


def test_exact_kl_of_rows_that_differ_in_the_last_bits_keeps_its_digits() -> None:
    log_p = special.log_softmax(np.linspace(0, 5, 1000))
    tilt = np.linspace(-1, 1, 1000)
    log_q = special.log_softmax(log_p + 1e-8 * tilt)
    p = np.exp(log_p)
    variance = (p * tilt**2).sum() - (p * tilt).sum() ** 2
    # KL of an exponential tilt by t is t² Var/2 to leading order: 1e-17 here, where Σ p (log p - log q) is noise.
    assert kl.exact_kl(log_p, log_q) == pytest.approx(0.5e-16 * variance, rel=1e-6)


def test_exact_kl_survives_tokens_that_one_side_thinks_impossible() -> None:
    log_p = np.array([0.0, -2000.0])
    log_q = np.log([0.25, 0.75])
    assert kl.exact_kl(log_p, log_q) == pytest.approx(np.log(4))
    assert kl.exact_kl(log_q, log_p) == pytest.approx(0.25 * np.log(0.25) + 0.75 * (np.log(0.75) + 2000))


@pytest.mark.parametrize(
    ("log_p", "log_q", "message"),
    [
        ([2.0, 1.0], np.log([0.5, 0.5]), "log_p has a row"),
        (np.log([0.5, 0.5]), [-1.0, -1.0], "log_q has a row"),
        (np.log([0.5, 0.5]), [0.0], "shape"),
        (0.0, 0.0, "single number"),
    ],
)
def test_rows_that_are_no_distributions_are_refused(log_p: object, log_q: object, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        kl.exact_kl(log_p, log_q)  # type: ignore[arg-type]


def test_a_row_with_minus_infinity_is_refused() -> None:
    with pytest.raises(NonFinite, match="log_q"):
        kl.exact_kl([0.0, -800.0], [0.0, -np.inf])

from decimal import Decimal, localcontext

import pytest

from zerodrift.stats import kl


def exact_k3(r: float) -> float:
    with localcontext() as context:
        context.prec = 800
        return float(Decimal(r).exp() - 1 - Decimal(r))


@pytest.mark.parametrize(
    "size", [1e-300, 1e-160, 1e-16, 1e-9, 1e-7, 1e-5, 9.99e-3, 1e-2, 1.001e-2, 0.3, 5.0, 200.0]
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_k3_is_exact_from_rounding_noise_to_disaster(size, sign):
    r = sign * size
    assert kl.k3([r])[0] == pytest.approx(exact_k3(r), rel=1e-13, abs=1e-320)


@pytest.mark.parametrize("size", [1.1e-4, 3e-4, 7e-4, 1e-3, 3e-3, 5.5e-3, 9.9e-3])
@pytest.mark.parametrize("sign", [-1, 1])
def test_small_k3_keeps_all_digits(size, sign):
    """exp(r) - 1 - r by subtraction has lost three of them at 1e-3."""
    assert kl.k3([sign * size])[0] == pytest.approx(exact_k3(sign * size), rel=5e-16, abs=0)

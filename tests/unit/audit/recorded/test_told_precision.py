import numpy as np
import pytest

from zerodrift.audit.recorded.told_precision import (
    LEAST_ON_GRID,
    Shown,
    decimal_step,
    in_fp32,
    nearer_than_rounding,
    on_bf16_grid,
    precision_of,
    widened,
)
from zerodrift.config.precision import Precision
from zerodrift.drift.gates import Gates

NATS = np.ones(20)
FP32, BF16 = np.full(20, 2e-6), np.full(20, 1e-2)
FEW = np.where(np.arange(20) < 2, FP32, BF16)
ONE = np.where(np.arange(20) < 1, FP32, BF16)
NUMBERS = -np.linspace(0.1, 3.0, 40)
ON_GRID = -np.arange(1, LEAST_ON_GRID + 1) / 64


@pytest.mark.parametrize(
    ("sizes", "nats", "known"),
    [
        (FP32, NATS, True),
        (FEW, NATS, True),
        (ONE, NATS, False),
        (BF16, NATS, False),
        (FP32, NATS / 100, False),
    ],
    ids=["all", "one in ten", "one", "none", "certain tokens only"],
)
def test_what_fits_tells(sizes, nats, known):
    told = precision_of(None, Shown(sizes, nats, NUMBERS))
    assert (told.precision, told.known) == (Precision.FP32 if known else Precision.BF16, known)


def test_what_is_said_holds():
    told = precision_of(Precision.FP8, Shown(FP32, NATS, ON_GRID))
    assert (told.precision, told.known) == (Precision.FP8, True)


@pytest.mark.parametrize(
    ("numbers", "on"),
    [
        (ON_GRID, True),
        (np.append(ON_GRID, [0.0, -np.inf]), True),
        (ON_GRID[1:], False),
        (np.append(ON_GRID, -0.3), False),
        (np.append(ON_GRID, -1.0 - 2.0**-8), False),
        (np.append(ON_GRID, -1.0 - 2.0**-40), False),
    ],
    ids=["on it", "zeros count for nothing", "too few", "one is not", "a bit too many", "no fp32 either"],
)
def test_numbers_that_were_rounded_to_bf16(numbers, on):
    assert on_bf16_grid(numbers) is on
    told = precision_of(None, Shown(BF16, NATS, numbers))
    assert (told.precision, told.known) == (Precision.BF16, on)


@pytest.mark.parametrize(("places", "step"), [(2, 1e-3), (3, 1e-3), (4, 1e-4), (6, 1e-6), (9, 0.0)])
def test_numbers_that_were_cut_off(places, step):
    numbers = np.round(-np.random.default_rng(0).exponential(size=4000), places)
    assert decimal_step(numbers) == pytest.approx(step)
    assert decimal_step(numbers[: LEAST_ON_GRID - 1]) == 0
    known = precision_of(None, Shown(np.full(20, 2.5e-4), NATS, numbers)).known
    assert known is (step == pytest.approx(1e-3))


def test_gates_allow_for_what_was_cut_off():
    exact = -np.random.default_rng(0).exponential(size=4000)
    off, gates = np.abs(np.round(exact, 4) - exact), widened(Gates(0.0, 0.0, 0.0, 2.0), 1e-4)
    assert off.mean() == pytest.approx(gates.mean, rel=0.05)
    assert np.quantile(off, 0.9) == pytest.approx(gates.p90, rel=0.05)
    assert (off**2 / 2).mean() == pytest.approx(gates.k3, rel=0.05)


@pytest.mark.parametrize(
    ("precision", "mean", "hint"),
    [
        (Precision.BF16, 1e-6, True),
        (Precision.FP8, 1e-6, True),
        (Precision.BF16, 0.01, False),
        (Precision.FP32, 1e-9, False),
        (Precision.BF16, None, False),
    ],
)
def test_gates_that_are_far_too_wide(precision, mean, hint):
    assert ("--precision fp32" in nearer_than_rounding(precision, mean, 0.02)) is hint


def test_a_size_that_is_nothing_is_not_told_as_a_measurement_of_nothing():
    assert in_fp32("they fit", 0.0).message.endswith("they fit to less than 1e-08 nats")
    assert in_fp32("they fit", 2.2e-7).message.endswith("they fit to 2e-07 nats")

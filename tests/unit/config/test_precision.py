import math

import pytest

from zerodrift.config.precision import PROFILES, Magnitude, Precision, PrecisionProfile
from zerodrift.core.errors import InvalidValue


def test_every_precision_has_a_profile():
    assert set(PROFILES) == set(Precision)


@pytest.mark.parametrize("precision", Precision)
def test_the_gate_lies_above_healthy(precision):
    profile = PROFILES[precision]
    for name in Magnitude.__struct_fields__:
        assert 0 < getattr(profile.healthy, name) < getattr(profile.gate, name)


def test_lower_precision_is_allowed_more():
    for name in Magnitude.__struct_fields__:
        for side in ("healthy", "gate"):
            sizes = [getattr(getattr(PROFILES[precision], side), name) for precision in Precision]
            assert sizes == sorted(sizes)
            assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("precision", Precision)
def test_sizes_fit_one_distribution(precision):
    """k3 ≈ σ²/2, and the mean of |Δ| cannot exceed σ; p90 lies between mean and what Markov's inequality allows."""
    for size in (PROFILES[precision].healthy, PROFILES[precision].gate):
        assert size.mean_abs <= math.sqrt(2 * size.k3) * 1.1
        assert size.mean_abs < size.p90_abs < 10 * size.mean_abs


def test_known_faults_fail_the_bf16_gate_and_known_healthy_engines_pass():
    gate = PROFILES[Precision.BF16].gate
    assert 0.018 < gate.mean_abs < 0.201  # stale weights, TRL #5312
    assert 1.5e-3 < gate.k3 < 0.013  # GLM-5.2 shortly before its collapse


@pytest.mark.parametrize(
    ("healthy", "gate"),
    [
        ((0.01, 0.02, 1e-3), (0.1, 0.2, 2e-3)),
        ((0.01, 0.02, 1e-3), (0.02, 0.4, 4e-3)),
        ((0.03, 0.05, 1e-3), (0.02, 0.05, 2e-3)),
    ],
    ids=["mean", "p90", "below healthy"],
)
def test_a_profile_with_a_gate_that_never_decides_is_refused(healthy, gate):
    sizes = [Magnitude(mean_abs=mean, p90_abs=p90, k3=k3) for mean, p90, k3 in (healthy, gate)]
    with pytest.raises(InvalidValue):
        PrecisionProfile(healthy=sizes[0], gate=sizes[1])

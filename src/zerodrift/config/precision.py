"""How far apart may a healthy engine and trainer be, given the precision they compute in?

No single number fits: a gate that catches a fault in fp32 alarms on every healthy bf16 engine. So each profile
pairs the magnitude seen on healthy stacks with the gate above it. Δ is log π_trainer − log π_engine of one
sampled token, in nats; k3 = exp(Δ) − 1 − Δ.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from zerodrift.core.errors import InvalidValue


class Precision(StrEnum):
    """The lowest precision that either side computes in; it sets the rounding that nobody can avoid."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"


class Magnitude(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Three sizes of the difference: two that barely vary between batches, and the one that people report."""

    mean_abs: float
    """Mean of |Δ|."""
    p90_abs: float
    """90th percentile of |Δ|."""
    k3: float
    """Mean of k3: the estimate of KL(engine ‖ trainer) per token."""

    @property
    def least_k3(self) -> float:
        """What k3 is at least where |Δ| has this mean, and where it has this 90th percentile.

        k3 is about Δ²/2, whose mean is not below mean²/2, and a tenth of the tokens lie above the percentile.
        """
        return max(self.mean_abs**2 / 2, self.p90_abs**2 / 20)


class PrecisionProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What healthy looks like in one precision, and where an audit draws the line."""

    healthy: Magnitude
    gate: Magnitude

    def __post_init__(self) -> None:
        """No gate may stand where another one always fails first, and none below what is healthy."""
        for size in (self.healthy, self.gate):
            # Healthy k3 in fp32 was rounded to a power of ten.
            if size.least_k3 > size.k3 * 1.2:
                raise InvalidValue(
                    f"k3 {size.k3:.2g} goes with no |Δ| of this size ({size.least_k3:.2g} at least)"
                )
        if any(
            getattr(self.healthy, name) >= getattr(self.gate, name) for name in Magnitude.__struct_fields__
        ):
            raise InvalidValue("a gate lies below what is healthy")


# Nobody publishes p90. It is 2.06 times the mean of |Δ| for Gaussian and 2.30 times for Laplace noise, and
# the tails of real Δ are heavier still: 2.5 times the mean, healthy and gate alike.
_P90_PER_MEAN = 2.5


def _profile(healthy: tuple[float, float], gate: tuple[float, float]) -> PrecisionProfile:
    sizes = [
        Magnitude(mean_abs=mean, p90_abs=_P90_PER_MEAN * mean, k3=divergence)
        for mean, divergence in (healthy, gate)
    ]
    return PrecisionProfile(healthy=sizes[0], gate=sizes[1])


PROFILES: Mapping[Precision, PrecisionProfile] = {
    # vLLM 0.32 on CPU against transformers, both fp32: mean |Δ| 1.5e-6; stacks of one framework sit between
    # 1e-6 and 1e-5. k3 ≈ Δ²/2 is then 1e-12, far below what fp32 logprobs resolve, so its gate is set just
    # below the gap between frameworks at 7B: RMS 1.7e-3 (Fast-LLM PR 525), k3 ≈ 1.4e-6.
    Precision.FP32: _profile(healthy=(1.5e-6, 1e-12), gate=(1e-5, 1e-6)),
    # mean |Δ| 0.010-0.018 (TRL #5312, Qwen2.5-1.5B), 0.011 (vime #64, Qwen3-4B), 0.0165 (IsoExec, 35B MoE);
    # k3 6.4e-4 dense and 1.5e-3 MoE (R3 paper). Stale weights: 0.201 within one step (TRL #5312).
    Precision.BF16: _profile(healthy=(0.018, 6e-4), gate=(0.03, 2e-3)),
    # k3 0.0014-0.0018 at 9B and 0.0024-0.0031 at 35B (NeMo-RL), 0.0038 with float scales and 0.0059 with
    # UE8M0 ones (prime-rl #3112). The healthy mean is ours: k3 ≈ σ²/2 and mean |Δ| ≈ 0.46 σ, the ratio of bf16,
    # at k3 = 0.0018.
    Precision.FP8: _profile(healthy=(0.028, 1.8e-3), gate=(0.04, 6e-3)),
}

"""When does a running training job stop trusting its engine?

Thresholds apply to the mismatch of engine and trainer under the same weights. The distance to a frozen
reference policy is no such measure: it grows because the model learns.
"""

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue

_COUNTS = {
    "check_interval_steps": "it counts optimizer steps between two costly checks",
    "reward_baseline_window": "it counts rewards",
    "consecutive_windows": "it counts bad windows in a row",
}


class MonitoringConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often to look, what counts as bad, and when to act."""

    kl_threshold: float | None = None
    """Mean k3 (nats per token, each token counted for at most one nat of Δ) above which a window is bad; None takes the
    k3 gate of the audit, or of the precision."""
    check_interval_steps: int = 50
    """Optimizer steps between two checks that cost something: canaries, re-scored samples, whole reward distributions.
    Every batch is judged, whatever this says."""
    reward_baseline_window: int = 1000
    """Rewards that the baseline of the reward comparison holds."""
    circuit_breaker_enabled: bool = True
    """Keep bad batches out of training, and halt; otherwise only warn."""
    consecutive_windows: int = 3
    """Bad windows in a row that halt, and good ones that close the breaker: spikes are common and harmless, trends are
    neither. A window is one observed batch."""
    clip_epsilon: float = 0.2
    """The trainer's ε, for the clip rate: ratios outside [1 - ε, 1 + ε]."""
    least_ess: float = 0.3
    """Token ESS, unclamped, below which a batch is bad, whichever gap it is that took it there."""
    max_lag: int | None = None
    """Versions that the weights of a token may be behind the trainer's; None allows any."""

    def __post_init__(self) -> None:
        """A monitor that can never, or must always, alarm is refused."""
        if self.kl_threshold is not None:
            rule = "it is a positive number of nats; null takes the gate of the precision"
            require.real(InvalidValue, "kl_threshold", self.kl_threshold, rule, 1e-15)
        for name, rule in _COUNTS.items():
            require.whole(InvalidValue, name, getattr(self, name), rule, 1)
        rule = "ratios are clipped to [1 - ε, 1 + ε], so it lies between 0 and 1"
        require.real(InvalidValue, "clip_epsilon", self.clip_epsilon, rule, 1e-6, 1 - 1e-6)
        require.real(
            InvalidValue, "least_ess", self.least_ess, "ESS lies between 0 and 1; 0 asks for nothing", 0, 1
        )
        if self.max_lag is not None:
            require.whole(InvalidValue, "max_lag", self.max_lag, "it counts versions; null allows any", 0)

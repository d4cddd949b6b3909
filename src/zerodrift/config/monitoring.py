"""When does a running training job stop trusting its engine?

Thresholds apply to the mismatch of engine and trainer under the same weights. The distance to a frozen
reference policy is no such measure: it grows because the model learns.
"""

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue

_COUNTS = {
    "check_interval_steps": "it counts optimizer steps between two checks",
    "reward_baseline_window": "it counts rewards",
    "consecutive_windows": "it counts bad windows in a row",
}


class MonitoringConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often to look, what counts as bad, and when to act."""

    kl_threshold: float | None = None
    """Mean k3 (nats per token) above which a window is bad; None takes the k3 gate of `validation`."""
    check_interval_steps: int = 50
    """Optimizer steps between two checks."""
    reward_baseline_window: int = 1000
    """Rewards that the baseline of the reward comparison holds."""
    circuit_breaker_enabled: bool = True
    """Stop training on rollouts once the breaker trips; otherwise only warn."""
    consecutive_windows: int = 3
    """Bad windows in a row that trip the breaker: spikes are common and harmless, trends are neither."""

    def __post_init__(self) -> None:
        """A monitor that can never, or must always, alarm is refused."""
        if self.kl_threshold is not None:
            rule = "it is a positive number of nats; null takes the gate of the precision"
            require.real(InvalidValue, "kl_threshold", self.kl_threshold, rule, 1e-15)
        for name, rule in _COUNTS.items():
            require.whole(InvalidValue, name, getattr(self, name), rule, 1)

"""How long may an audit take? `--budget 90s`, `10m`, `1h`."""

import re

from zerodrift.core.errors import ConfigError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LEAST, MOST = 20.0, 24 * 3600.0
"""Seconds. Below, loading a model takes all of it; above, nobody waits."""


def seconds_of(budget: str) -> float:
    """What was typed, in seconds."""
    typed = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", budget.strip())
    if typed is None:
        raise ConfigError(f"--budget is {budget!r}; give a number with s, m or h: 90s, 10m or 1h")
    seconds = float(typed[1]) * UNITS[typed[2]]
    if not LEAST <= seconds <= MOST:
        raise ConfigError(f"--budget is {budget}; give from {LEAST:.0f}s to {MOST / 3600:.0f}h")
    return seconds

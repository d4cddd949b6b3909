"""How large is the drift beside what rounding explains and what the audit allows?

One row per statistic that a gate reads. A statistic that was not measured has no row, so that a missing number
cannot be mistaken for a small one.
"""

from typing import NamedTuple

from zerodrift.records.verdict import VerdictRecord

# Statistic -> (what people call it, its gate); floors carry the statistic's own name.
_STATISTICS = {
    "mean": ("mean |Δ|", "mean"),
    "p90": ("p90 |Δ|", "p90"),
    "k3": ("k3", "k3"),
    "max": ("max |Δ|", "veto"),
}


class Gauge(NamedTuple):
    """One statistic of Δ in nats, with its marks where there are any."""

    name: str
    measured: float
    floor: float | None
    gate: float | None
    interval: tuple[float, float] | None = None

    @property
    def broken(self) -> bool:
        """The statistic lies above its gate."""
        return self.gate is not None and self.measured > self.gate

    @property
    def of_gate(self) -> float | None:
        """Measured in units of the gate."""
        return self.measured / self.gate if self.gate else None


def gauges(record: VerdictRecord) -> tuple[Gauge, ...]:
    """A row for every statistic that `record` holds."""
    found = []
    for key, (name, gate) in _STATISTICS.items():
        if key not in record.metrics:
            continue
        bounds = record.metrics.get(f"{key}_low"), record.metrics.get(f"{key}_high")
        interval = (bounds[0], bounds[1]) if bounds[0] is not None and bounds[1] is not None else None
        found.append(
            Gauge(name, record.metrics[key], record.floor.get(key), record.gates.get(gate), interval)
        )
    return tuple(found)

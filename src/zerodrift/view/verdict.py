"""What a verdict says first: is it the same policy, who is wrong, why, what to type, and how large is the drift?

Page and terminal say the same thing because both say what stands here. A statistic that was not measured has no gauge, so
that a missing number cannot be mistaken for a small one.
"""

import re
from typing import NamedTuple

from zerodrift.records.verdict import Outcome, VerdictRecord
from zerodrift.view.notation import count

NOT_SEEN = " would not be seen"
"""How a line of the power says that no size of a deviation would have been."""
HEADLINES = {
    Outcome.PASS: "The same policy",
    Outcome.FAIL: "Not the same policy",
    Outcome.INCONCLUSIVE: "Not judged",
}


def guilty(record: VerdictRecord) -> str:
    """The side that left the other two, in words."""
    sides = {
        "engine": f"The engine ({record.engine.engine})",
        "trainer": "The trainer",
        "none": "Neither side",
        "unknown": "Not known",
    }
    return sides.get(record.guilty, record.guilty)


def scope(record: VerdictRecord) -> str:
    """What a PASS is about, on its first screen: how much was judged, and the most telling of what would have been seen."""
    if record.verdict is not Outcome.PASS or "tokens" not in record.metrics:
        return ""
    said = [
        line.message.partition("; ")[0].replace(": ", " ", 1)
        for line in record.power
        if line.name in _TELLING
    ]
    missed = [each.removesuffix(NOT_SEEN) for each in said if each.endswith(NOT_SEEN)]
    seen = [each for each in said if not each.endswith(NOT_SEEN)]
    told = f"; would have been seen: {'; '.join(seen)}" if seen else ""
    told += f"; would not have been seen: {'; '.join(missed)}" if missed else ""
    return f"{count(record.metrics['tokens'])} tokens judged{told}"


def how_to(fix: str) -> str:
    """What to do with a fix: an option, a setting or a command can be typed, and a sentence cannot."""
    return "type this" if _TYPED.match(fix) else "do this"


def next_step(record: VerdictRecord) -> tuple[str, str] | None:
    """What to do first, with the words that introduce it; None where there is nothing, or nothing is known."""
    if record.to_fix:
        fix = record.to_fix[0].fix
        return how_to(fix), fix
    if record.verdict is Outcome.INCONCLUSIVE and record.reproduce:
        return "fix what could not be judged, then", record.reproduce
    return None


_TELLING = ("lower temperature", "higher temperature", "far positions")
_TYPED = re.compile(r"--[a-z]|[A-Z][A-Z0-9_]+=|(GET|POST) /|(zerodrift|vllm|unset|export) ")
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

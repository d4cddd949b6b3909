"""One cell over time: three charts, and the little that its baseline may follow the policy.

A chart is a clipped CUSUM of z. Batches differ by more than their sequences tell (other prompts, another mood of the
policy), so z is divided by how much it varies from one batch to the next, which a lasting shift does not change.
"""

import math
from typing import NamedTuple

import msgspec

from zerodrift.monitor.cells import ALL, EXCHANGEABLE, CellSums, Expected
from zerodrift.stats.sequential import Cusum

WARN, QUARANTINE = 8.0, 13.0
"""Evidence in standard deviations. At 13 one chart in 3e6 batches is false (Siegmund), were z normal and the slack
unused; a batch is held against about a hundred charts, and over 1,000 healthy steps the highest stood at 6. From rest no
alarm comes in fewer than four batches: what must be seen at once is seen by its size."""
OWN_ALLOWANCE = 1.0
"""k of a cell that has a baseline of its own, taken from a few batches of a few tokens: that error is up to 0.6 of a
batch's standard deviation and lasts, where k = 0.5 suits cells that are held against the whole."""
RATE = 0.003
"""Most that a level follows for each version of the weights: 0.3 %, or that share of |Δ| for a bias. A mismatch that
doubles with the policy over 350 steps is followed, since what is followed lags by 1 / GAIN versions; one that does so in 230 is not."""
GAIN = 0.1
WARM_UP = 10
"""Batches in which a cell of its own learns where it stands; the whole watches over it meanwhile."""
LEAST_UNITS = 4
"""Sequences. A z of fewer is no z."""
LEAST_EFFECTIVE = 2.0
"""What they must be worth at least: of one that has everything no spread is known at all."""
BOUND = 100.0
"""Of z: an exact engine that is off by anything at all has no spread to compare with."""
CHARTS = ("up", "down", "scale")
MOST_SPREAD = 5.0
"""Times the spread within a batch that batches may differ by. Moods of 6 % from batch to batch are 3.5 times."""
_SPREAD_WEIGHT = 0.05
GOOD = 1.0
"""z of a batch that speaks for the end of an alarm."""
JUMP = 2.0
"""Times the expected |Δ| in one batch, with JUMP_Z beside it."""
JUMP_Z = 4.0


class Chart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One residual of one cell over time."""

    cusum: Cusum = Cusum(threshold=QUARANTINE)
    last: float | None = None
    variance: float = 1.0
    """Of z, by half the squared difference of neighbours."""
    good: int = 0
    """Good batches in a row since it alarmed; an alarm is over after as many as the breaker asks for."""
    tripped: bool = False

    def update(self, z: float) -> "Chart":
        """With one more batch."""
        variance = self.variance
        z = min(max(z, -BOUND), BOUND)
        if self.last is not None:
            step = min((z - self.last) ** 2 / 2, MOST_SPREAD**2)
            variance += _SPREAD_WEIGHT * (step - variance)
        scaled = z / math.sqrt(max(1.0, variance))
        cusum = self.cusum.update(scaled)
        if cusum.score > 1.5 * QUARANTINE:
            # Evidence beyond the alarm would only delay the all-clear.
            cusum = msgspec.structs.replace(cusum, score=1.5 * QUARANTINE)
        tripped = self.tripped or cusum.alarm
        good = self.good + 1 if tripped and scaled < GOOD else 0
        return Chart(cusum=cusum, last=z, variance=variance, good=good, tripped=tripped)

    def closed(self, good_needed: int) -> "Chart":
        """As it was before, once enough good batches have followed an alarm."""
        return self.rested() if self.tripped and self.good >= good_needed else self

    def rested(self) -> "Chart":
        """Without evidence."""
        fresh = msgspec.structs.replace(self.cusum, score=0.0)
        return msgspec.structs.replace(self, cusum=fresh, tripped=False, good=0)


class Track(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell's own place beside the baseline, and its charts."""

    bias: float
    bias_squares: float = 0.0
    """Σ (bias of a batch - their mean)² over the warm-up."""
    log_factor: float = 0.0
    batches: int = 0
    charts: tuple[Chart, Chart, Chart]

    @classmethod
    def start(cls, kind: str, expected: Expected) -> "Track":
        """Of a cell that was not seen before."""
        allowance = 0.5 if kind in EXCHANGEABLE else OWN_ALLOWANCE
        chart = Chart(cusum=Cusum(allowance=allowance, threshold=QUARANTINE))
        return cls(bias=expected.bias, log_factor=math.log(expected.factor), charts=(chart, chart, chart))

    def with_charts(self, charts: tuple[Chart, ...]) -> "Track":
        """The same place, other charts."""
        up, down, scale = charts
        return msgspec.structs.replace(self, charts=(up, down, scale))

    def rested(self) -> "Track":
        """Charts at rest."""
        return self.with_charts(tuple(chart.rested() for chart in self.charts))

    @property
    def expected(self) -> Expected:
        """What its residuals are taken against."""
        return Expected(self.bias, math.exp(self.log_factor))

    @property
    def unsure(self) -> float:
        """Standard error of the bias that was learned. Where one batch of ten had a token that was far off, the nine others
        are no measure of it: such a baseline quarantined eight healthy batches of one environment."""
        return math.sqrt(self.bias_squares / (WARM_UP * (WARM_UP - 1)))

    @property
    def in_doubt(self) -> bool:
        """Half way to a warning: too little to say so, and enough not to learn from it."""
        return any(chart.cusum.score >= WARN / 2 for chart in self.charts)

    @property
    def alarmed(self) -> bool:
        """A warning or more, until enough good batches have followed: nothing is learned from a cell like that."""
        return any(chart.tripped or chart.cusum.score >= WARN for chart in self.charts)

    def moved(self, whole: Expected, bias: float) -> "Track":
        """The same place beside the whole and the same evidence, under a baseline of that `bias` where the whole is at 1."""
        place = {
            "bias": self.bias - whole.bias + bias,
            "log_factor": self.log_factor - math.log(whole.factor),
        }
        return msgspec.structs.replace(self, **place)

    def judged(self, cell: CellSums) -> bool:
        """Whether a batch of this cell goes into the charts."""
        ready = cell.kind in EXCHANGEABLE or self.batches >= WARM_UP
        return ready and has_spread(cell)

    def update(self, cell: CellSums, whole: CellSums) -> "Track":
        """With one more batch in its charts.

        The spread of four prompts is known from four prompts: their z is Student's t, which a chart of normal z takes for
        evidence. On vLLM with four prompts a step one of a healthy replica stood at 9.7 of 13 after seven batches.
        """
        zs = (as_normal(t, whole.effective - 1) for t in cell.z(whole, self.unsure))
        return self.with_charts(tuple(chart.update(z) for chart, z in zip(self.charts, zs, strict=True)))

    def follow(self, cell: CellSums, versions: int) -> "Track":
        """Moved towards what a batch showed that was not bad; `versions` of the weights have passed."""
        if cell.units < LEAST_UNITS or cell.size <= 0:
            return self
        batches, mean = self.batches + 1, cell.baseline / cell.tokens
        own = cell.kind not in EXCHANGEABLE and batches <= WARM_UP
        suspicious = any(chart.cusum.score >= WARN for chart in self.charts)
        gain = (
            1 / batches if own else 0.0 if suspicious else max(GAIN, 1 / batches if cell.kind != ALL else 0.0)
        )
        most = math.inf if own else RATE * versions
        to_factor = gain * (math.log(cell.against_baseline) - self.log_factor)
        off = cell.ratio / cell.tokens - self.bias
        to_bias = gain * off
        return msgspec.structs.replace(
            self,
            batches=batches,
            bias_squares=self.bias_squares + (off * (off - to_bias) if own else 0.0),
            log_factor=self.log_factor + min(max(to_factor, -most), most),
            bias=self.bias + min(max(to_bias, -most * mean), most * mean),
        )


def has_spread(cell: CellSums) -> bool:
    """Whether its units tell how far they differ."""
    return cell.units >= LEAST_UNITS and cell.expected > 0 and cell.effective >= LEAST_EFFECTIVE


class Jumped(NamedTuple):
    """A cell that is far off in one batch."""

    times: float
    z: float


def jumped(cell: CellSums, whole: CellSums, factor: float) -> Jumped | None:
    """Twice the expected |Δ| and beyond chance.

    The units of the whole, from which a small cell borrows, say how sure anybody is of a spread: of four prompts, whose
    samples share their first token, one that rounds badly was 2.0 times the expected |Δ| in a healthy training on vLLM.
    """
    if not has_spread(cell):
        return None
    times = cell.size / max(cell.baseline * factor, cell.least(whole))
    z = as_normal(cell.z(whole)[2], whole.effective - 1)
    return Jumped(times, z) if times >= JUMP and z >= JUMP_Z else None


def as_normal(t: float, freedom: float) -> float:
    """The z that is as unlikely as Student's t (Wallace 1959; at most 0.1 too low for t up to 20 of three degrees)."""
    if not math.isfinite(t):
        return t
    freedom = max(1.0, freedom)
    size = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.copysign(size, t)

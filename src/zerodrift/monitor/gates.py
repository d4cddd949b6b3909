"""Is a batch above the gate, or may chance have put it there?

A gate is about an engine, and a batch is a few thousand of its tokens. Where experts are chosen, one token in five hundred may
be a nat off and healthy: 500 tokens of a mixture of experts left its gate 60 times in 459 honest steps, three times in a row at last.
So a batch is bad if it is beyond the gate by more than its own spread allows, and a chart remembers those that are beyond it by less.
"""

import math
from typing import NamedTuple

from zerodrift.config.precision import Magnitude
from zerodrift.drift.gates import LEAST_TOKENS
from zerodrift.monitor.batch import BatchSums
from zerodrift.monitor.decision import Code, Gap, Reason
from zerodrift.monitor.tracks import JUMP, JUMP_Z, Chart, as_normal

SURE = 3.0
"""Standard deviations beyond a gate from which one batch is enough: one in 700 of an engine that stands at it, none in ten
thousand of one that is a standard deviation below."""


class GateJudged(NamedTuple):
    """What the gates say of a batch, with their chart as it is after it."""

    reasons: tuple[Reason, ...]
    chart: Chart


class _Size(NamedTuple):
    """One mean of a batch beside its gate."""

    name: str
    value: float
    limit: float
    z: float
    """By how many standard deviations it is beyond."""


def judge_gates(sums: BatchSums, gate: Magnitude, chart: Chart, good_needed: int) -> GateJudged:
    """Mean |Δ| and k3, of tokens that count for at most one nat each."""
    tokens = sums.mismatch.summary.count
    if not tokens:
        return GateJudged((), chart)
    sizes = _sizes(sums, tokens, gate)
    chart = chart.update(max(size.z for size in sizes))
    lasting = chart.tripped and not chart.good
    few = tokens < LEAST_TOKENS and not _surely_above(sizes[0])
    reasons = [
        _reason(size, warning=not lasting and (few or size.z < SURE))
        for size in sizes
        if size.value > size.limit
    ]
    chart = chart.closed(good_needed)
    return GateJudged(tuple(reasons or _tail(sums, gate)), chart)


def _sizes(sums: BatchSums, tokens: int, gate: Magnitude) -> tuple[_Size, _Size]:
    mean, k3 = sum(sums.warm_up.sizes) / tokens, sums.k3 / tokens
    # ψ² is about twice k3, and its square is what k3's own spread is made of.
    return (
        _size("mean |Δ|", mean, 2 * k3, gate.mean_abs, tokens),
        _size("k3", k3, sums.k3_squares / tokens, gate.k3, tokens),
    )


def _size(name: str, value: float, square: float, limit: float, tokens: int) -> _Size:
    error = math.sqrt(max(0.0, square - value * value) / tokens)
    t = (value - limit) / error if error else math.copysign(math.inf, value - limit)
    return _Size(name, value, limit, as_normal(t, max(1, tokens - 1)))


def _surely_above(mean: _Size) -> bool:
    """Twice the gate and beyond chance: 193 tokens of a stream with a fault of 0.2 nats were trained on with a warning."""
    return mean.value >= JUMP * mean.limit and mean.z >= JUMP_Z


def _reason(size: _Size, *, warning: bool) -> Reason:
    within = f", {size.z:.1f} standard deviations beyond it" if warning else ""
    return Reason(
        code=Code.GATE, gap=Gap.MISMATCH, value=size.value, limit=size.limit, warning=warning,
        message=f"{size.name} of the mismatch is {size.value:.3g}, and the gate {size.limit:.3g}{within}",
    )  # fmt: skip


def _tail(sums: BatchSums, gate: Magnitude) -> tuple[Reason, ...]:
    raw = sums.mismatch.summary.k3
    if raw <= gate.k3:
        return ()
    message = f"k3 is {raw:.3g}, above the gate {gate.k3:.3g}, by a few tokens alone (max |Δ| {sums.mismatch.summary.max:.3g})"
    return (Reason(code=Code.TAIL, gap=Gap.MISMATCH, value=raw, limit=gate.k3, message=message),)

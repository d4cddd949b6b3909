"""From the sums of a batch to reasons: first what is too large in this batch, then what has been so for too long."""

from collections.abc import Mapping
from typing import NamedTuple

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.monitor.batch import BatchSums
from zerodrift.monitor.cells import ALL, CellSums, Expected
from zerodrift.monitor.decision import Code, Gap, Reason
from zerodrift.monitor.tracks import CHARTS, WARN, Track, jumped

MOVED = 1.5
"""Times the baseline as it was taken: from here on a new canary is asked for."""
MOST_REASONS = 12
_CODES = {"up": Code.BIAS, "down": Code.BIAS, "scale": Code.SCALE}
WHOLE = f"{ALL}={ALL}"


class Judged(NamedTuple):
    """What the mismatch of one batch says, with the charts as they are after it."""

    reasons: tuple[Reason, ...]
    tracks: Mapping[str, Track]


def levels(sums: BatchSums, config: MonitoringConfig) -> list[Reason]:
    """What is too large in this batch by itself; the gates are in `gates`."""
    return [
        *sums.trips, *_nothing(sums), *_ess(sums, config.least_ess), *_lag(sums, config.max_lag), *_padding(sums),
    ]  # fmt: skip


def _nothing(sums: BatchSums) -> list[Reason]:
    """Of all ranks together: one that got none of the batch spoils it for nobody."""
    if sums.tokens or sums.trips:
        return []
    message = "no token is left after the mask, so nothing could be judged; look at the mask, or leave the batch out"
    return [Reason(code=Code.NOTHING_TO_JUDGE, message=message)]


def _ess(sums: BatchSums, least: float) -> list[Reason]:
    named: list[tuple[Gap | None, float]] = []
    for gap, each in (
        (Gap.MISMATCH, sums.mismatch),
        (Gap.STALENESS, sums.staleness),
        (Gap.UPDATE, sums.update),
    ):
        if each.summary.count and each.summary.ess < least:
            named.append((gap, each.summary.ess))
    total = sums.total.summary
    if not named and total.count and total.ess < least:
        named.append((None, total.ess))
    return [
        Reason(
            code=Code.ESS, gap=gap, value=ess, limit=least,
            message=f"token ESS of the {gap or 'whole ratio'} is {ess:.3g}, below {least:g}: few tokens carry the batch",
        )
        for gap, ess in named
    ]  # fmt: skip


def _lag(sums: BatchSums, most: int | None) -> list[Reason]:
    if most is None or sums.lag_max is None or sums.lag_max <= most:
        return []
    message = f"a token was made by weights {sums.lag_max} versions old, and {most} are allowed"
    return [
        Reason(
            code=Code.LAG, gap=Gap.STALENESS, value=float(sums.lag_max), limit=float(most), message=message
        )
    ]


def _padding(sums: BatchSums) -> list[Reason]:
    if not sums.padding:
        return []
    message = (
        f"{sums.padding} of {sums.tokens} tokens are exactly 0 on every side, at an end of their rows, and nobody said which count: "
        "padding makes every distance smaller than it is; give mask= or lengths="
    )
    return [Reason(code=Code.PADDING, value=float(sums.padding), message=message)]


def charts(cells: Mapping[str, CellSums], tracks: Mapping[str, Track], good_needed: int) -> Judged:
    """Every cell into its charts. `tracks` has all of them."""
    reasons: list[tuple[float, Reason]] = []
    after = dict(tracks)
    level = tracks[WHOLE].expected.factor if WHOLE in tracks else 1.0
    for key, cell in cells.items():
        track = tracks[key]
        where = "" if cell.kind == ALL else key
        jump = jumped(cell, cells[WHOLE], max(level, track.expected.factor))
        if jump is not None:
            message = f"|Δ| is {jump.times:.1f} times what tokens as likely as these show{' in ' + where if where else ''}"
            reasons.append((100 + jump.times, _reason(Code.JUMP, where, jump.times, 2.0, message)))
        if not track.judged(cell):
            continue
        track = track.update(cell, cells[WHOLE])
        reasons += _of_charts(track, cell, where)
        after[key] = track.with_charts(tuple(chart.closed(good_needed) for chart in track.charts))
    reasons.sort(key=lambda pair: (not pair[1].bad, bool(pair[1].where), -pair[0]))
    return Judged(tuple(reason for _, reason in reasons[:MOST_REASONS]), after)


def _of_charts(track: Track, cell: CellSums, where: str) -> list[tuple[float, Reason]]:
    found = []
    for name, chart in zip(CHARTS, track.charts, strict=True):
        score = chart.cusum.score
        if not chart.tripped and score < WARN:
            continue
        code, message = _CODES[name], _message(name, cell, track.expected, where)
        if chart.tripped and chart.good:
            found.append((score, _reason(Code.HALF_OPEN, where, score, chart.cusum.threshold, message)))
        else:
            reason = _reason(code, where, score, chart.cusum.threshold, message, warning=not chart.tripped)
            found.append((score, reason))
    return found


def _message(name: str, cell: CellSums, expected: Expected, where: str) -> str:
    place = f" in {where}" if where else ""
    if name == "scale":
        times = cell.against_baseline / expected.factor
        return f"|Δ| has been above its baseline{place}, now {times:.3f} times"
    offset = cell.ratio / cell.tokens - expected.bias
    return f"the mean ratio has left its baseline{place}, now by {offset:+.2g}"


def _reason(
    code: Code, where: str, value: float, limit: float, message: str, *, warning: bool = False
) -> Reason:
    return Reason(
        code=code, gap=Gap.MISMATCH, where=where, value=value, limit=limit, message=message, warning=warning
    )


def moved(tracks: Mapping[str, Track]) -> list[Reason]:
    """The level has followed the policy so far that somebody should measure."""
    growth = tracks[WHOLE].expected.factor if WHOLE in tracks else 1.0
    if growth <= MOVED:
        return []
    message = (
        f"the mismatch has followed the policy to {growth:.2f} times its baseline; take a canary (`retake`)"
    )
    return [Reason(code=Code.BASELINE_MOVED, gap=Gap.MISMATCH, value=growth, limit=MOVED, message=message)]

"""What updates showed about receipts, one line of JSON each, and the tables that many such lines make. Torch-free.

A line says what was judged of one update with the first 256, 512, … canary tokens:

    honest   it was sent
    summed   it was sent, and is judged together with those since the last that was confirmed, as `ReceiptTaker` does
    lost     the engine as if nothing had come
    nothing  the same weights were sent once more, and the trainer changed nothing

and how far the statistics lay from what they should be, in units that the bound is in.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import beta

from zerodrift.core.errors import ConfigError
from zerodrift.stats.arrays import Floats
from zerodrift.sync.canary import LENGTH
from zerodrift.sync.judge import Arrival, CanaryScores, Shares, SideFacts, judge
from zerodrift.sync.slope import FALSE_ALARM, critical, excess

SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
LEVELS = (0.3, 0.1, 0.01, 1e-3)
"""At which the bound is held against how often a statistic was reached: at 1e-4 there is nothing to count."""
SENT, SUMMED, LOST, NOTHING = CASES = ("honest", "summed", "lost", "nothing")

Line = dict[str, Any]


class Moment(NamedTuple):
    """What both sides say of one version; the engine again after the same weights were sent once more."""

    trainer: Floats
    engine: Floats
    again: Floats
    trainer_s: float
    engine_s: float


class Sums:
    """By number of tokens, the last version whose receipt was confirmed."""

    def __init__(self, first: Moment) -> None:
        self._last = dict.fromkeys(SIZES, first)
        self._before = first

    def line(self, now: Moment) -> Line:
        """Of the update from the moment before to this one."""
        before, self._before = self._before, now
        both = min(len(before.engine), len(now.engine))
        moved = now.trainer[:both] - before.trainer[:both]
        told = {
            "tokens": len(now.engine),
            "signal": float(np.sqrt((moved**2).mean())),
            "error": float(np.abs(now.engine - now.trainer).mean()),
            "other_bits": int((now.engine != now.again).sum()),
            "trainer_s": round(now.trainer_s, 4),
            "engine_s": round(now.engine_s, 4),
        }
        sizes = [size for size in SIZES if size <= both]
        return told | {"of": {str(size): self._judged(before, now, size) for size in sizes}}

    def _judged(self, before: Moment, now: Moment, size: int) -> Line:
        scores = _cases(before, self._last[size], now, size)
        found = {case: judge(each, Shares(), SideFacts()) for case, each in scores.items()}
        if found[SUMMED].arrival is Arrival.CONFIRMED:
            self._last[size] = now
        said: Line = {case: finding.arrival.value for case, finding in found.items()}
        return said | {
            "slope": found[SENT].fit.estimate,
            "needed": found[SENT].needed,
            "t": found[SENT].fit.statistic(1.0),
            "t_nothing": _excess(scores[NOTHING]),
        }


def _cases(before: Moment, last: Moment, now: Moment, size: int) -> dict[str, CanaryScores]:
    if len(last.engine) < size:
        last = before
    sequence = np.arange(size) // (LENGTH - 1)

    def scores(*four: Floats) -> CanaryScores:
        return CanaryScores(*(each[:size] for each in four), sequence)

    return {
        SENT: scores(before.trainer, now.trainer, before.engine, now.engine),
        SUMMED: scores(last.trainer, now.trainer, last.engine, now.engine),
        LOST: scores(before.trainer, now.trainer, before.engine, before.again),
        NOTHING: scores(now.trainer, now.trainer, now.engine, now.again),
    }


def _excess(scores: CanaryScores) -> float:
    off = [np.abs(side - scores.trainer_after) for side in (scores.engine_after, scores.engine_before)]
    return excess(off[0], off[1], scores.sequence)


def read(path: Path) -> Iterator[Line]:
    """Lines that are whole: the last may have been cut."""
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(text)
        except ValueError as error:
            if not path.read_text().endswith("\n" + text):
                raise ConfigError(f"{path} has a line that is not JSON: {text[:80]}") from error


def table(lines: Iterable[Line]) -> str:
    """By engine, learning rate and number of tokens."""
    kept = list(lines)
    groups: dict[tuple[str, float, int], list[Line]] = defaultdict(list)
    for line in kept:
        for size, of in line["of"].items():
            groups[line["run"]["engine"], line["lr"], int(size)].append(line | {"of": of})
    head = (
        "engine          lr tokens | lost: missed  (at least) |  sent: confirmed   summed | false alarms: sent  summed nothing "
        "| slope            needed  signal  mean|Δ| | s engine trainer\n"
    )
    rows = [_row(*key, groups[key]) for key in sorted(groups)]
    return head + "".join(rows) + "\n" + _bound(kept)


def _row(engine: str, rate: float, tokens: int, lines: list[Line]) -> str:
    said = {case: Counter(line["of"][case] for line in lines) for case in CASES}
    number, slopes = len(lines), [line["of"]["slope"] for line in lines]
    seen = said[LOST][Arrival.MISSED]
    needed = [line["of"]["needed"] for line in lines if line["of"]["needed"] is not None]
    timed = [line for line in lines if line["tokens"] == tokens]
    seconds = "".join(f"{_median(line[side] for line in timed):>8}" for side in ("engine_s", "trainer_s"))
    return (
        f"{engine:<12} {rate:>5g} {tokens:>6} | {seen:>5} of {number:<5} {_at_least(seen, number):>9.2%} "
        f"| {said[SENT][Arrival.CONFIRMED]:>7} of {number:<5} {said[SUMMED][Arrival.CONFIRMED]:>7} "
        f"| {said[SENT][Arrival.MISSED]:>10} of {number:<5} {said[SUMMED][Arrival.MISSED]:>4} {said[NOTHING][Arrival.MISSED]:>7} "
        f"| {np.mean(slopes):>6.3f} ± {np.std(slopes):<7.3f} {_median(needed):>6} "
        f"{np.mean([line['signal'] for line in lines]):>7.2g} {np.mean([line['error'] for line in lines]):>8.2g} | {seconds}\n"
    )


def _at_least(seen: int, number: int) -> float:
    """Clopper and Pearson's lower limit at 95 %, of what was seen `seen` times in `number`."""
    return float(beta.ppf(0.05, seen, number - seen + 1)) if seen else 0.0


def _median(values: Iterable[float]) -> str:
    numbers = list(values)
    return f"{float(np.median(numbers)):.4g}" if numbers else "-"


def _bound(lines: list[Line]) -> str:
    """How often a statistic lay where the bound allows it to with a level, each update counted at its most tokens."""
    text = [
        f"false alarms of one receipt, by the bound: at most {FALSE_ALARM:g} (a statistic beyond {critical(3):.2f})",
        f"{'engine':<12} {'statistic':<26} {'number':>7} "
        + "".join(f"{f'beyond {level:g}':>16}" for level in LEVELS)
        + "   largest",
    ]
    by_engine: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_engine[line["run"]["engine"]].append(line["of"][max(line["of"], key=int)])
    for engine, ofs in sorted(by_engine.items()):
        for name, values, sides in (
            ("slope 1, of what was sent", [abs(of["t"]) for of in ofs], 2),
            ("error, of nothing", [of["t_nothing"] for of in ofs], 1),
        ):
            limits = [critical(sides, level) for level in LEVELS]
            counts = [sum(value > limit for value in values) for limit in limits]
            shares = "".join(f"{count:>8} {count / len(values):>7.2%}" for count in counts)
            text.append(f"{engine:<12} {name:<26} {len(values):>7} {shares}   {max(values):.2f}")
    return "\n".join(text) + "\n"

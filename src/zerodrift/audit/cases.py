"""Which tokens does attribution look at?

Rows of logits are what attribution costs, so of every chosen output only a window of neighbouring tokens is judged, with
the whole context before it still forwarded. A third of the tokens goes to the worst windows, because a rare fault must be
seen. The others are chosen by chance, from all sequences, the worst among them or not: the share that a cause explains
is estimated on these alone, since the worst were chosen by the very difference that is to be explained.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from zerodrift.audit.counterfactual.evaluate import CaseWindow
from zerodrift.audit.measure import Measurement
from zerodrift.core.completion import FinishReason
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import Gates
from zerodrift.stats.arrays import Floats
from zerodrift.stats.intervals import FEWEST_SEQUENCES

WORST_SHARE = 3
"""One token in so many is of the worst windows. Ten of 8 tokens are enough to find a path by; the other twenty windows
carry the interval."""
WILD = 50.0
SHORT = 256
"""Tokens of prompt and output. With prompts of 1,024 tokens among them, attribution of SmolLM2 took more than ten minutes."""
TYPICAL = 0.5


class _Span(NamedTuple):
    """Tokens `begin` up to `end` of the output of one sequence."""

    sequence: int
    begin: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.begin


def choose_cases(
    measurements: Sequence[Measurement], floor: Floor, gates: Gates, budget: int, rng: np.random.Generator
) -> list[CaseWindow]:
    """Windows of about `budget` tokens in all, so narrow that twenty sequences chosen by chance fit; the worst first."""
    whole = [_case(item, floor, gates) for item in measurements]
    sizes = [_sizes(item, case) for item, case in zip(measurements, whole, strict=True)]
    for_worst = max(1, budget // WORST_SHARE)
    widest = max(1, (budget - for_worst) // min(FEWEST_SEQUENCES, len(whole)))
    windows = [_windows(number, len(case.output), widest) for number, case in enumerate(whole)]

    def badness(window: _Span) -> float:
        return float(sizes[window.sequence][window.begin : window.end].mean())

    worst = sorted((max(parts, key=badness) for parts in windows), key=badness, reverse=True)
    chosen = dict.fromkeys(_fill(worst, for_worst), False)
    at_random = [
        windows[number][rng.integers(len(windows[number]))] for number in rng.permutation(len(whole))
    ]
    # What the worst leave over goes to chance, and what they overdraw is not taken from it.
    left = budget - min(for_worst, sum(window.width for window in chosen))
    chosen |= dict.fromkeys(_fill(at_random, left, free=chosen), True)
    return [
        _cut(whole[window.sequence], window, at_random=chosen[window])
        for window in sorted(chosen, key=badness, reverse=True)
    ]


def affordable(measurements: Sequence[Measurement]) -> Sequence[Measurement]:
    """The short sequences, where there are enough of them and they are off as much as all are: a forward of the others
    costs many times as much, and attribution asks for hundreds."""
    short = [item for item in measurements if item.observed.length <= SHORT]
    if len(short) < FEWEST_SEQUENCES or len(short) == len(measurements):
        return measurements
    return short if _off(short) >= TYPICAL * _off(measurements) else measurements


def _off(measurements: Sequence[Measurement]) -> float:
    """Mean |Δ|, with what is impossible counted as much."""
    sizes = np.concatenate([np.abs(item.delta) for item in measurements])
    return float(np.minimum(np.nan_to_num(sizes, nan=WILD), WILD).mean())


def _case(item: Measurement, floor: Floor, gates: Gates) -> CaseWindow:
    completion = item.observed.completion
    sigma = floor.sigma(item.contracted)
    # Below a third of the gate nothing needs a cause; without this, fp32 rounding of another framework would.
    sigma = np.hypot(sigma, gates.mean / 3)
    return CaseWindow(
        completion.prompt_token_ids,
        completion.token_ids,
        item.observed.requested,
        item.reported,
        sigma,
        stopped=completion.finish_reason is FinishReason.STOP,
    )


def _sizes(item: Measurement, case: CaseWindow) -> Floats:
    """|Δ| in units of σ, with wild tokens counted as fifty."""
    return np.minimum(np.abs(item.delta) / case.sigma, WILD)


def _windows(sequence: int, length: int, widest: int) -> list[_Span]:
    """The output in parts of nearly equal width: every token is in one, so that chance prefers none."""
    count = -(-length // widest)
    edges = [length * part // count for part in range(count + 1)]
    return [_Span(sequence, edges[part], edges[part + 1]) for part in range(count)]


def _fill(order: Iterable[_Span], budget: int, free: Iterable[_Span] = ()) -> list[_Span]:
    """From the first on until the budget is spent, which the last may overdraw; what is `free` costs nothing more."""
    known, chosen = set(free), list[_Span]()
    for window in order:
        if budget <= 0:
            break
        chosen.append(window)
        budget -= 0 if window in known else window.width
    return chosen


def _cut(case: CaseWindow, window: _Span, *, at_random: bool) -> CaseWindow:
    judged = slice(window.begin, window.end)
    return case._replace(
        output=case.output[: window.end],
        reported=case.reported[judged],
        sigma=case.sigma[judged],
        stopped=case.stopped and window.end == len(case.output),
        before=window.begin,
        at_random=at_random,
    )

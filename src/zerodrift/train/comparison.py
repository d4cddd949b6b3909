"""Do two kinds of training differ by more than their seeds do? Torch-free: numbers of finished runs in, a verdict out.

Every quantity is asked twice, of all steps and of the last third, where what began late is not diluted, and the p-values of
all are adjusted together. A difference counts where it is beyond the seeds and large enough to matter (`QUANTITIES`): two
releases of an engine round otherwise, which three runs of each show beyond doubt and no training feels.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from zerodrift.config.precision import PROFILES, Precision
from zerodrift.core.frozen import freeze
from zerodrift.records.verdict import Outcome
from zerodrift.stats.run_means import began, detectable, holm, least_rank_p, summary_of_runs
from zerodrift.stats.summaries import mean_shift

LEVEL = 0.05
"""Two equal kinds of training are called different once in 20 comparisons at most, by chance."""
FEWEST_RUNS = 2
"""Of each kind; one has no spread."""
_TAIL = 3
"""The last third is asked by itself, where there are as many steps."""


class Quantity(NamedTuple):
    """What is compared, and from where on a difference of it matters."""

    name: str
    title: str
    least: float
    """Smaller differences are no differences."""
    share: float = 0.0
    """Nor are those below this share of the larger mean."""

    def counts(self, first: float, second: float) -> float:
        """Differences between means of these sizes count from here on."""
        return max(self.least, self.share * max(abs(first), abs(second)))


_GATE = PROFILES[Precision.FP32].gate
QUANTITIES = (
    Quantity("reward", "reward", 0.01),
    Quantity("clip_rate", "clip rate", 0.005),
    # Sizes that rounding in fp32 may have are no difference, nor is a fifth more of one that is there on both sides.
    Quantity("kl", "KL", _GATE.k3, 0.2),
    Quantity("reference_kl", "KL to reference", 0.001, 0.1),
    Quantity("entropy", "entropy", 0.02),
    Quantity("ess", "ESS", 0.001),
    Quantity("lag", "lag", 0.05),
    Quantity("mismatch", "mismatch", _GATE.mean_abs, 0.2),
    Quantity("kept_back", "kept back", 0.05),
)
"""Per step: the mean reward, the share of clipped ratios, k3 of the trainer's newest numbers against the engine's, k3 to the first weights,
-log p of what was sampled, token ESS, versions that the oldest token is behind, mean |engine - trainer| over the tokens that were
scored again, and whether the batch was kept back."""


class RunSeries(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run, as far as it is compared."""

    seed: int
    directory: str
    steps: int
    halted: bool
    """The monitor ended it."""
    values: Mapping[str, tuple[float | None, ...]]
    """Of each step, by the name of the quantity; None where a step could not show it."""
    reasons: Mapping[str, int] = {}
    """In how many batches the monitor found what."""

    def __post_init__(self) -> None:
        """What was measured stays."""
        freeze(self, "values", "reasons")


class Band(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One quantity of one side, over its seeds."""

    mean: float
    low: float
    """Of the seeds' own means, the least and the largest: with a handful of runs there is nothing finer to say."""
    high: float
    steps: tuple[tuple[float, float, float] | None, ...]
    """Mean, least and largest of each step; None where not all of the runs show it."""


class ComparedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One quantity of both sides."""

    name: str
    title: str
    first: Band
    second: Band
    difference: float
    """Second less first, over the steps that `of` says."""
    of: str
    """`all steps`, or the last so many where those tell more."""
    p_value: float
    """Adjusted for all that was asked."""
    counts_from: float
    seen_from: float
    """A difference of this size would have been found 19 times in 20."""
    differs: bool
    since: int | None
    """Step from which on it is there; None where it does not differ."""


class SidesJudged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer, without what explains it."""

    outcome: Outcome
    """PASS: no difference beyond seeds. FAIL: there is one. INCONCLUSIVE: it could not be told."""
    message: str
    steps: int
    """That all runs have: so many were compared."""
    rows: tuple[ComparedRow, ...]
    least_rank_p: float
    """What permuting whole runs could at best have shown."""

    @property
    def since(self) -> int | None:
        """First step of any difference."""
        return min((row.since for row in self.rows if row.since is not None), default=None)


class _Asked(NamedTuple):
    """One question: a quantity over some of the steps."""

    quantity: Quantity
    begin: int
    first: list[float]
    second: list[float]


def judge(first: Sequence[RunSeries], second: Sequence[RunSeries]) -> SidesJudged:
    """Finished runs of two kinds; all that they have in common is compared."""
    steps = min((run.steps for run in (*first, *second)), default=0)
    if min(len(first), len(second)) < FEWEST_RUNS or not steps:
        told = (
            "no step was done" if first and second and not steps else "one run has no spread to compare with"
        )
        message = f"{told}: {len(first)} and {len(second)} runs; give --seeds 3"
        return SidesJudged(
            outcome=Outcome.INCONCLUSIVE, message=message, steps=steps, rows=(), least_rank_p=1.0
        )
    asked = [each for quantity in QUANTITIES for each in _asked(quantity, first, second, steps)]
    rows = _rows(asked, first, second, steps)
    halts = _halts(first, second)
    message = "; ".join(filter(None, (_differing(rows), halts)))
    return SidesJudged(
        outcome=Outcome.FAIL if message else Outcome.PASS,
        message=message or "no difference beyond seeds",
        steps=steps,
        rows=tuple(rows),
        least_rank_p=least_rank_p(len(first), len(second)),
    )


def _differing(rows: Sequence[ComparedRow]) -> str:
    """What differs, the earliest first."""
    since: dict[int, list[str]] = {}
    for row in rows:
        if row.since is not None:
            since.setdefault(row.since, []).append(row.title)
    told = [f"{', '.join(titles)} since step {step}" for step, titles in sorted(since.items())]
    return f"differs in {'; in '.join(told)}" if told else ""


def _halts(first: Sequence[RunSeries], second: Sequence[RunSeries]) -> str:
    """A monitor that halts every run of one side and none of the other has found something; no chance does that."""
    for side, here, there in (("A", first, second), ("B", second, first)):
        if all(run.halted for run in here) and not any(run.halted for run in there):
            return f"the monitor halted every run of {side} and none of the other"
    return ""


def _asked(
    quantity: Quantity, first: Sequence[RunSeries], second: Sequence[RunSeries], steps: int
) -> list[_Asked]:
    """All steps, and the last third; nothing of a quantity that not every run shows."""
    begins = (0,) if steps < _TAIL else (0, steps - steps // _TAIL)
    found = []
    for begin in begins:
        means = [[_mean(run, quantity.name, begin, steps) for run in runs] for runs in (first, second)]
        ours, theirs = ([value for value in side if value is not None] for side in means)
        if len(ours) == len(first) and len(theirs) == len(second):
            found.append(_Asked(quantity, begin, ours, theirs))
    return found


def _mean(run: RunSeries, name: str, begin: int, end: int) -> float | None:
    told = [value for value in run.values.get(name, ())[begin:end] if value is not None]
    return math.fsum(told) / len(told) if told else None


def _rows(
    asked: Sequence[_Asked], first: Sequence[RunSeries], second: Sequence[RunSeries], steps: int
) -> list[ComparedRow]:
    shifts = [mean_shift(summary_of_runs(each.second), summary_of_runs(each.first)) for each in asked]
    adjusted = holm([shift.p_value for shift in shifts])
    rows: dict[str, ComparedRow] = {}
    for each, shift, p_value in zip(asked, shifts, adjusted, strict=True):
        quantity = each.quantity
        counts = quantity.counts(_average(each.first), _average(each.second))
        differs = p_value <= LEVEL and abs(shift.difference) >= counts
        row = ComparedRow(
            name=quantity.name, title=quantity.title, first=band(first, quantity.name, steps, each.begin),
            second=band(second, quantity.name, steps, each.begin), difference=shift.difference,
            of="all steps" if not each.begin else f"last {steps - each.begin} steps", p_value=p_value, counts_from=counts,
            seen_from=max(counts, detectable(shift.spread, len(first), len(second), LEVEL / len(asked))),
            differs=differs, since=_since(first, second, quantity.name, steps) if differs else None,
        )  # fmt: skip
        before = rows.get(quantity.name)
        # The last third takes the place of the whole only where it alone shows something.
        if before is None or (row.differs and not before.differs):
            rows[quantity.name] = row
    return list(rows.values())


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _since(first: Sequence[RunSeries], second: Sequence[RunSeries], name: str, steps: int) -> int:
    sides = [band(runs, name, steps).steps for runs in (first, second)]
    told = [
        (step, theirs[0] - ours[0])
        for step, (ours, theirs) in enumerate(zip(*sides, strict=True))
        if ours is not None and theirs is not None
    ]
    return told[began([difference for _, difference in told])][0] if told else 0


def band(runs: Sequence[RunSeries], name: str, steps: int, begin: int = 0) -> Band:
    """Of runs that all show the quantity in some step; means are those from step `begin` on."""
    means = [value for run in runs if (value := _mean(run, name, begin, steps)) is not None]
    return Band(
        mean=_average(means),
        low=min(means),
        high=max(means),
        steps=tuple(_at([run.values[name][step] for run in runs]) for step in range(steps)),
    )


def _at(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    told = [value for value in values if value is not None]
    return (_average(told), min(told), max(told)) if len(told) == len(values) else None

"""The steps of a training as columns, and the history of its breaker: what every viewer is shown, kept once.

A column has a number for each step, NaN where the step did not show it. Single precision: a plot has 400 rows of pixels.
"""

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from typing import Annotated

import msgspec

from zerodrift.monitor.decision import State
from zerodrift.monitor.metrics import GAPS, PREFIX

MEASURES = ("mean_abs", "bias", "p99", "max", "k3")
COLUMNS = (
    "state",
    *(f"{gap}/{measure}" for gap in ("mismatch", "staleness", "update") for measure in MEASURES),
    *(f"{gap}/clip_rate" for gap in ("mismatch", "staleness", "update")),
    *("total/mean_abs", "total/token_ess", "total/sequence_ess"),
    *("entropy", "lag/mean", "lag/max", "baseline/mean_abs", "kl_estimate", "reference_kl"),
    *("reward/mean", "reward/baseline_mean", "reward/baseline_margin"),
)
"""Of single precision. Before them come `step` and `time`, which need more."""
MOST_CHANGES = 2000
"""Entries of the history that are kept; a page lists as many as fit."""
NAN = math.nan


class Told(msgspec.Struct):
    """A reason, as a line has it; what a later version adds is left alone."""

    code: str
    message: str
    gap: str | None = None
    where: str = ""
    value: float | None = None
    limit: float | None = None
    warning: bool = False


class Step(msgspec.Struct):
    """A line of steps.jsonl, as far as it is shown."""

    time: float
    step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    state: State
    train: bool
    metrics: dict[str, float]
    reasons: list[Told] = []
    not_observable: dict[str, str] = {}


class SeriesChange(msgspec.Struct):
    """One entry of the history: consecutive steps that were found to be the same, for the same reasons."""

    id: int
    revision: int
    """Of the history when it was last changed: who has seen that one knows this entry as it is."""
    first: int
    last: int
    count: int
    state: str
    before: str
    time: float
    reasons: list[Told]

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """What makes the next step the same."""
        return self.state, tuple(sorted(reason.code + reason.where for reason in self.reasons))


_DECODER = msgspec.json.Decoder(Step)


def step_of(line: bytes) -> Step:
    """Raises ValueError where it is none."""
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


class Series:
    """Grows at its end. `epoch` counts how often it was cut: then viewers begin anew."""

    def __init__(self) -> None:
        """Empty."""
        self.epoch = 0
        self.steps, self.times = array("d"), array("d")
        self.columns = {name: array("f") for name in COLUMNS}
        self._by_metric = [(PREFIX + name, column) for name, column in self.columns.items()]
        self.changes: deque[SeriesChange] = deque(maxlen=MOST_CHANGES)
        self.last: Step | None = None
        self.kept_back = 0
        self.counts = dict.fromkeys(State, 0)
        self.rewound: list[tuple[int, int]] = []
        self.revision = 0
        """Steps that the history has seen."""

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: Step) -> None:
        """The next line. Steps that were there before are made again by a training that went back to a checkpoint."""
        alert = bool(self.steps) and step.step == self.steps[-1] and not step.metrics.get(f"{PREFIX}tokens")
        if alert and "kl_estimate" not in step.metrics:
            self.columns["state"][-1] = max(self.columns["state"][-1], _level(step))
        else:
            if self.steps and step.step <= self.steps[-1]:
                self._cut(step.step)
            self._append(step)
        self._remember(step)
        self.last = step
        self.kept_back += not step.train
        self.counts[step.state] += 1

    def _append(self, step: Step) -> None:
        self.steps.append(step.step)
        self.times.append(step.time)
        for name, column in self._by_metric:
            column.append(step.metrics.get(name, NAN))

    def _cut(self, step: int) -> None:
        row = bisect_left(self.steps, step)
        self.rewound.append((int(self.steps[-1]), step))
        for column in (self.steps, self.times, *self.columns.values()):
            del column[row:]
        self.epoch += 1

    def _remember(self, step: Step) -> None:
        self.revision += 1
        before = self.changes[-1] if self.changes else None
        entry = SeriesChange(
            id=self.revision, revision=self.revision, first=step.step, last=step.step, count=1, state=step.state,
            before=before.state if before else "", time=step.time, reasons=step.reasons,
        )  # fmt: skip
        if before and before.key == entry.key and before.last <= step.step:
            before.revision, before.last, before.count = self.revision, step.step, before.count + 1
            before.reasons = step.reasons
        else:
            self.changes.append(entry)

    def unseen(self) -> Mapping[str, str]:
        """Why the last step does not show a gap."""
        told = self.last.not_observable if self.last else {}
        return {gap: why for gap, why in told.items() if gap in GAPS}


def _level(step: Step) -> float:
    return step.metrics.get(f"{PREFIX}state", 0.0)

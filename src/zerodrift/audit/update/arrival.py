"""Which part of the update did not arrive? Found among all tensors and their rows by linear response, and then proven.

Δ is regressed on what less of each part would do to every logprob: on few parts at once, as for faults inside a model
(`audit/response/pursuit.py`), and on all layers, roles or kinds together, for an update that broke off. What is found is
done to the weights for real, and must explain the engine's numbers.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from zerodrift.audit.response.pursuit import LEAST_R2, Pursuit, pursue
from zerodrift.audit.response.rows import RowRange, best_rows, coarse_rows
from zerodrift.audit.update.groups import GROUPINGS
from zerodrift.audit.update.parts import Part, Slopes, grouped, parts_of
from zerodrift.audit.update.scale import account_of, share_of
from zerodrift.audit.update.seen import HALF, SETTLED, Seen, UpdateExplanation
from zerodrift.audit.update.weights import Move, UpdatedWeights
from zerodrift.stats.arrays import Floats
from zerodrift.stats.intervals import Interval

MISSING = 0.5
"""A group whose effect is present to more than this share did not arrive."""
BOUNDS = (-2.0, 3.0)
"""Of what is there beyond one update: from one that was subtracted to one that was applied four times."""
ABOUT_MISSING = (-1.4, -0.6)
"""Derivatives say so where a part is not there at all: the update of a tensor is small, and not without curvature."""
SIMPLER = 0.02
"""Share of the difference that a further part, or a share that is not nothing, must explain beyond."""
REFINEMENTS = 4
LEAST_ROWS = 8
"""Of a tensor, for its rows to be asked for by themselves."""


def arrivals(weights: UpdatedWeights, seen: Seen, rng: np.random.Generator) -> Iterator[UpdateExplanation]:
    """Accounts of what arrived, up to the first that leaves nothing to explain."""
    slopes = weights.slopes(seen.completions)
    search = _Search(weights, seen, slopes, rng)
    best = 0.0
    for account in search.accounts():
        if account.explained > HALF:
            yield account
        best = max(best, account.explained)
        if best > SETTLED:
            return


def shares(delta: Floats, columns: Sequence[Floats]) -> list[float]:
    """Of each column, how much of it is missing in Δ: none is less than nothing."""
    # Groups with large effects must not drown the others: columns are scaled, shares are scaled back.
    matrix = -np.stack(columns, axis=1)
    scale = np.sqrt((matrix**2).sum(axis=0)).clip(min=1e-12)
    solution, _ = nnls(matrix / scale, delta)
    return (solution / scale).tolist()  # type: ignore[no-any-return]


class _Search:
    """One difference, and what may explain it."""

    def __init__(self, weights: UpdatedWeights, seen: Seen, slopes: Slopes, rng: np.random.Generator) -> None:
        self._weights, self._seen, self._slopes, self._rng = weights, seen, slopes, rng
        self._delta = seen.reported - seen.at_new
        # As `audit/response/locate.py` has it: no token is louder than others.
        usual = max(float(np.median(np.abs(self._delta))), seen.gap / 10)
        self._unit = np.hypot(usual, self._delta)

    def accounts(self) -> Iterator[UpdateExplanation]:
        """Few parts first, then all groups of a kind together."""
        parts = parts_of(self._weights.rows, self._weights.family)
        found = self._pursued(parts)
        if found.follows:
            yield from self._few([parts[column] for column in found.chosen], found.r2)
        else:
            yield from self._of_some_rows()
        yield from self._many()

    def _pursued(self, parts: Sequence[Part]) -> Pursuit:
        slopes_NK = np.stack([part.column(self._slopes) for part in parts], axis=1) / self._unit[:, None]
        low, high = (np.full(len(parts), end) for end in BOUNDS)
        # Each token for itself: an update has eight sequences, and signs of eight are soon the same by chance. That one
        # sequence explains another is for the proof to show, which no part of the model passes by chance.
        tokens = np.arange(len(self._delta))
        return pursue(self._delta / self._unit, slopes_NK.astype(np.float32), tokens, (low, high), self._rng)

    def _few(self, chosen: Sequence[Part], r2: float) -> Iterator[UpdateExplanation]:
        """One part if that does, or two, or three; the last that adds something."""
        best: UpdateExplanation | None = None
        for count in range(1, len(chosen) + 1):
            parts, doubt = self._sharpened(chosen[:count])
            account = self._proven(parts, r2, doubt)
            if best is None or account.explained > best.explained + SIMPLER:
                best = account
            if best.explained > SETTLED:
                break
        if best is not None:
            yield best

    def _of_some_rows(self) -> Iterator[UpdateExplanation]:
        """Rows that are near no half and no quarter: of each tensor those that fit best, judged on other tokens."""
        steps, half = self._delta / self._unit, self._rng.permutation(len(self._delta)) % 2 == 0
        best, name = max(
            (
                (min(self._held_out(steps, name, chosen_on) for chosen_on in (half, ~half)), name)
                for name, size in self._weights.rows.items()
                if size >= LEAST_ROWS
            ),
            default=(0.0, ""),
        )
        if best >= LEAST_R2:
            yield from self._few([Part(name, (name,))], best)

    def _held_out(self, steps: Floats, name: str, chosen_on: NDArray[np.bool_]) -> float:
        slopes_NR = self._slopes[name] / self._unit[:, None]
        first, last = coarse_rows(steps[chosen_on], slopes_NR[chosen_on])
        column, rest = slopes_NR[:, first:last].sum(axis=1), ~chosen_on
        value = column[chosen_on] @ steps[chosen_on] / max(float((column[chosen_on] ** 2).sum()), 1e-300)
        left = steps[rest] - value * column[rest]
        return 1 - float(left @ left) / max(float(steps[rest] @ steps[rest]), 1e-300)

    def _many(self) -> Iterator[UpdateExplanation]:
        for grouping in GROUPINGS:
            groups = grouped(self._weights.rows, self._weights.family, grouping)
            missing = shares(self._delta, [group.column(self._slopes) for group in groups])
            absent = [group for group, share in zip(groups, missing, strict=True) if share > MISSING]
            if absent and len(absent) < len(groups):
                left = self._left([Move(group, -1.0) for group in absent])
                yield self._stated(absent, [-1.0] * len(absent), left, 0.0)

    def _sharpened(self, chosen: Sequence[Part]) -> tuple[list[Part], str]:
        """Pieces of one tensor are one question, which rows of it; and how sure the answer is, in words."""
        parts = [part for part in chosen if len(part.tensors) > 1]
        singles = list(dict.fromkeys(part.tensors[0] for part in chosen if len(part.tensors) == 1))
        doubts = []
        for name in singles:
            others = [part for part in chosen if part.tensors != (name,)]
            rows = best_rows(self._without(others) / self._unit, self._slopes[name] / self._unit[:, None])
            everything = (rows.first, rows.last) == (0, self._weights.rows[name])
            parts.append(Part(name, (name,), None if everything else (rows.first, rows.last)))
            doubts.append("" if everything else _in_doubt(rows))
        return parts, "".join(doubts)

    def _without(self, parts: Sequence[Part]) -> Floats:
        """Δ without what these parts explain of it."""
        if not parts:
            return self._delta
        return self._delta - self._columns(parts) @ self._fit(parts, self._delta)

    def _columns(self, parts: Sequence[Part]) -> Floats:
        return np.stack([part.column(self._slopes) for part in parts], axis=1)

    def _fit(self, parts: Sequence[Part], left: Floats) -> Floats:
        columns = self._columns(parts) / self._unit[:, None]
        values: Floats = np.linalg.lstsq(columns, left / self._unit, rcond=None)[0].astype(np.float64)
        return values

    def _proven(self, parts: Sequence[Part], r2: float, doubt: str) -> UpdateExplanation:
        """Nothing of these parts, where that is all that is to it; else the shares that fit best."""
        values = self._fit(parts, self._delta)
        absent = None
        if all(ABOUT_MISSING[0] < value < ABOUT_MISSING[1] for value in values):
            nothing = [-1.0] * len(parts)
            left = self._left([Move(part, -1.0) for part in parts])
            absent = self._stated(parts, nothing, left, r2, doubt)
            if absent.explained > SETTLED:
                return absent
        values, left = self._refined(parts, values)
        shared = self._stated(parts, values.tolist(), left, r2, doubt)
        return shared if absent is None or shared.explained > absent.explained + SIMPLER else absent

    def _refined(self, parts: Sequence[Part], values: Floats) -> tuple[Floats, Floats]:
        """Shares that fit best with the weights turned for real, and what they leave of Δ."""
        left = self._left([Move(part, float(by)) for part, by in zip(parts, values, strict=True)])
        for _ in range(REFINEMENTS):
            tried = np.clip(values + self._fit(parts, left), *BOUNDS)
            then = self._left([Move(part, float(by)) for part, by in zip(parts, tried, strict=True)])
            if float(((then / self._unit) ** 2).sum()) >= float(((left / self._unit) ** 2).sum()):
                break
            values, left = tried, then
        return values, left

    def _left(self, moves: Sequence[Move]) -> Floats:
        scores = self._weights.score(self._weights.moved(moves), self._seen.completions)
        left: Floats = self._seen.reported - scores
        return left

    def _stated(
        self, parts: Sequence[Part], values: Sequence[float], left: Floats, r2: float, doubt: str = ""
    ) -> UpdateExplanation:
        explained = 1 - float(np.abs(left).mean()) / self._seen.gap
        stated: list[tuple[Part, Interval]] = [
            (part, share_of(1 + by, part.column(self._slopes), left, self._rng))
            for part, by in zip(parts, values, strict=True)
        ]
        return account_of(stated, explained, r2, doubt)


def _in_doubt(rows: RowRange) -> str:
    (low, high), (least, most) = rows.first_between, rows.last_between
    if low == high and least == most:
        return ""
    return f"; they begin between {low} and {high} and end between {least - 1} and {most - 1}"

"""Runs of channels: where does one that Δ follows really begin and end? By derivatives first, then with the run turned for real.

The effect of a run is the difference of two running sums, so that every pair of ends is tried by one product of matrices. As for
single knobs it is chosen on one half of the sequences and judged on the other, and against signs drawn anew. A change that is
not small bends away from its derivatives, so that its ends are moved then by steps that halve, while that leaves less of Δ.
Torch-free.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from zerodrift.audit.response.knobs import Knob, run
from zerodrift.audit.response.levers import Jacobian, Lever
from zerodrift.audit.response.pursuit import LEAST_R2, NULLS
from zerodrift.stats.arrays import Floats

MOST_ENDS = 256
"""Of a place; with every second one a bias of one channel of 256 was not followed. Of a stream of 4,096 every sixteenth is one."""
FIRST_STEP = 8
"""Channels, by which ends are moved first: a change of the size of what it changes had them off by up to six."""
MOST_MOVES = 60


class Places:
    """Every place whose channels lie together, with the effects of all runs between so many ends of it."""

    def __init__(self, jacobian: Jacobian, unit: Floats, levers: Sequence[Lever]) -> None:
        """Where a stream is wide, ends are looked at evenly over it; they are searched to the channel later."""
        self._blocks = [
            (lever, begin)
            for lever in levers
            for begin in (range(0, lever.size, lever.block) if lever.block else ())
        ]
        self._sums: list[Floats] = []
        self._ends: list[NDArray[np.int64]] = []
        for lever, begin in self._blocks:
            first = jacobian.columns[lever, begin]
            slopes_NR = jacobian.matrix_NC[:, first : first + lever.block] / unit[:, None]
            ends = np.unique(np.linspace(0, lever.block, min(lever.block, MOST_ENDS) + 1).astype(np.int64))
            running = np.cumsum(slopes_NR, axis=1, dtype=np.float64)
            sums = np.concatenate([np.zeros((len(unit), 1)), running], axis=1)
            self._sums.append(sums[:, ends])
            self._ends.append(ends)

    def followed(
        self, steps: Floats, groups: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[float, Knob | None]:
        """R² of the run that is followed most, in sequences that it was not chosen on; None where that may be chance."""
        names = rng.permutation(np.unique(groups))
        if len(names) < 2 or not self._blocks:
            return 0.0, None
        half = np.isin(groups, names[: len(names) // 2])
        sizes = {of: [_sizes(sums[at]) for sums in self._sums] for of, at in ((True, half), (False, ~half))}
        r2 = self._held_out(steps, half, sizes)
        if r2 < LEAST_R2:
            return r2, None
        for _ in range(NULLS):
            signs = dict(zip(names.tolist(), rng.choice((-1.0, 1.0), len(names)).tolist(), strict=True))
            if self._held_out(steps * np.array([signs[each] for each in groups.tolist()]), half, sizes) >= r2:
                return r2, None
        place, first, last = self._best(steps, [_sizes(sums) for sums in self._sums])
        lever, begin = self._blocks[place]
        ends = self._ends[place]
        return r2, run(lever, begin + int(ends[first]), begin + int(ends[last]))

    def _held_out(
        self, steps: Floats, half: NDArray[np.bool_], sizes: Mapping[bool, Sequence[Floats]]
    ) -> float:
        ways = []
        for of, chosen_on in ((True, half), (False, ~half)):
            place, first, last = self._best(steps[chosen_on], sizes[of], chosen_on)
            column = self._sums[place][:, last] - self._sums[place][:, first]
            one, other = column[chosen_on], column[~chosen_on]
            value = float(steps[chosen_on] @ one / max(float(one @ one), 1e-30))
            left = steps[~chosen_on] - value * other
            ways.append(1 - float(left @ left) / max(float(steps[~chosen_on] @ steps[~chosen_on]), 1e-30))
        return min(ways)

    def _best(
        self, steps: Floats, sizes: Sequence[Floats], at: NDArray[np.bool_] | slice = slice(None)
    ) -> tuple[int, int, int]:
        """Which place, and between which of its ends."""
        best = (-1.0, 0, 0, 1)
        for place, (sums, size_AB) in enumerate(zip(self._sums, sizes, strict=True)):
            along = steps @ sums[at]
            fit_AB = (along[None, :] - along[:, None]) ** 2 / size_AB
            number = int(fit_AB.argmax())
            first, last = divmod(number, len(along))
            best = max(best, (float(fit_AB[first, last]), place, first, last))
        return best[1:]


def _sizes(sums: Floats) -> Floats:
    """[end, end]: Σ of squares of what is between them; infinite where they are none."""
    gram = sums.T @ sums
    own = np.diag(gram)
    size_AB = own[:, None] + own[None, :] - 2 * gram
    usable = np.triu(np.ones_like(size_AB, dtype=np.bool_), 1) & (
        size_AB > 1e-9 * max(float(own.max()), 1e-300)
    )
    return np.where(usable, size_AB, np.inf)


def with_ends(knob: Knob, left: Callable[[Knob], float]) -> Knob:
    """The run near `knob` of which least is left when it is turned for real."""
    lever, (first, last) = knob.members[0][0][0], _ends(knob)
    begin = first - first % lever.block
    least, step, moves = left(knob), FIRST_STEP, 0
    while step and moves < MOST_MOVES:
        tried = []
        for one, other in ((step, 0), (-step, 0), (0, step), (0, -step)):
            ends = first + one, last + other
            if begin <= ends[0] < ends[1] <= begin + lever.block:
                tried.append((left(run(lever, *ends)), ends))
        moves += len(tried)
        best, ends = min(tried, default=(least, (first, last)))
        if best < least:
            least, (first, last) = best, ends
        else:
            step //= 2
    return run(lever, first, last)


def _ends(knob: Knob) -> tuple[int, int]:
    places = [index for (_, index), _ in knob.members]
    return min(places), max(places) + 1

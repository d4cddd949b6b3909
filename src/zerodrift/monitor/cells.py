"""Sums of the mismatch by cell: all tokens, a rarity, a position, a length, a lag, a replica, an environment.

Each sequence of a cell has two residuals, `offset` Σ(exp(ψ) - 1) - bias·n and `excess` Σ|ψ| - Σ expected, and a cell three
charts, each of a z with mean at most 0 while the baseline holds with its slack: of ±offset and of excess, less the slack.

The spread of a z is that between sequences in the same batch, or between prompts where `groups={"prompt": …}` tells them
apart, so no variance is taken from the past and no token counts as independent. A cell of few units borrows from the
spread of the whole: eight prompts alone know their own to a quarter.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.monitor.baseline import Baseline
from zerodrift.monitor.groups import UNIT
from zerodrift.monitor.intake import Tokens
from zerodrift.monitor.strata import LOG_P_LABELS, POSITION_LABELS, Counted
from zerodrift.stats.arrays import Floats, Ids

ALL = "all"
REPLICA = "replica"
EXCHANGEABLE = frozenset({ALL, REPLICA})
"""Cells that are held against the whole: a replica that was off from the start would otherwise be its own baseline."""
SLACK = 0.03
"""Of the expected |Δ|: 0.0004 nats of bias where 0.015 is healthy. A batch of millions of tokens resolves less than
anybody should act on."""
REPLICA_SLACK = 0.015
"""Of one replica: it is held against the others, so that no policy moves it, and has a part of the tokens to show it with."""
LEAST_LEVEL = 0.25
"""Of the expected |Δ| a token over all, that a token of any cell counts with at least. Tokens of p > 0.99 are off by 7e-6 nats
once a policy is sharp, and a bias of 1e-6 there, which cutting by rounded numbers alone makes, halted three honest trainings."""
BORROWED = 10
"""Units that the spread of the whole counts for beside a cell's own."""
PARTS = frozenset({"log p", "position"})
"""Cells that have a part of each unit, the others have whole ones."""


class Expected(NamedTuple):
    """What a cell's own history adds to the baseline."""

    bias: float
    factor: float


class Residual(NamedTuple):
    """A residual r of each unit beside its expectation e, in sums."""

    total: float = 0.0
    squares: float = 0.0
    cross: float = 0.0
    """Σ r·e."""

    @classmethod
    def of(cls, values: Floats, expected: Floats) -> "Residual":
        """One value per unit."""
        return cls(float(values.sum()), float(values @ values), float(values @ expected))

    def about_mean(self, expected: float, expected_squares: float) -> float:
        """Σ (r - μe)², where μ is the cell's own: what is left between units."""
        slope = self.total / expected
        return max(0.0, self.squares - 2 * slope * self.cross + slope * slope * expected_squares)


class CellSums(msgspec.Struct, frozen=True, array_like=True):
    """One cell of one batch; `+` adds what another rank has of it."""

    kind: str
    label: str
    tokens: float
    units: int
    ratio: float
    size: float
    baseline: float
    """Σ of what the baseline expects."""
    level: float
    """Tokens times the mean |ψ| of the baseline's own."""
    expected: float
    """The same, with the cell's own factor; and over units, squared."""
    expected_squares: float
    offset: Residual
    excess: Residual

    def __add__(self, other: "CellSums") -> "CellSums":
        """Both."""
        sums = (getattr(self, name) + getattr(other, name) for name in CellSums.__struct_fields__[2:-2])
        both = (
            Residual(*(a + b for a, b in zip(mine, theirs, strict=True)))
            for mine, theirs in ((self.offset, other.offset), (self.excess, other.excess))
        )
        return CellSums(self.kind, self.label, *sums, *both)

    def without(self, parts: Iterable["CellSums"]) -> "CellSums":
        """Level and bias of the rest, which is what a baseline follows; its spread is not that of the rest."""
        names = ("tokens", "ratio", "size", "baseline")
        left = {name: getattr(self, name) - sum(getattr(part, name) for part in parts) for name in names}
        return msgspec.structs.replace(self, **left)

    @property
    def key(self) -> str:
        """`replica=3`."""
        return f"{self.kind}={self.label}"

    @property
    def against_baseline(self) -> float:
        """Mean |ψ| over its expectation."""
        return self.size / self.baseline

    @property
    def effective(self) -> float:
        """Units that its numbers are worth. Of a policy that has all but collapsed one prompt has every token that is not certain:
        eight prompts are one then, whose spread nobody knows, and an honest training was halted for a jump of it."""
        return self.expected**2 / self.expected_squares

    def least(self, whole: "CellSums") -> float:
        """Σ |Δ| that is worth acting upon, whatever tokens as likely as these show."""
        return LEAST_LEVEL * self.tokens * whole.expected / whole.tokens

    def z(self, whole: "CellSums", unsure: float = 0.0) -> tuple[float, float, float]:
        """Of up, down and excess; `unsure` is the standard error of the bias that the cell is held against."""
        share = REPLICA_SLACK if self.kind == REPLICA else SLACK
        slack = share * max(self.expected, self.least(whole))
        # A bias was learned from the baseline's tokens, and is known no better than those allow, however sharp a policy is by
        # now: of one that had collapsed to |Δ| of 1e-7 nats a replica was off by 2e-7, and an honest training was halted.
        bias_slack = max(slack, share * self.level)
        offset, excess = (self._spread(whole, name) for name in ("offset", "excess"))
        offset = math.hypot(offset, unsure * self.tokens)
        return (
            _over(self.offset.total - bias_slack, offset),
            _over(-self.offset.total - bias_slack, offset),
            _over(self.excess.total - slack, excess),
        )

    def _spread(self, whole: "CellSums", name: str) -> float:
        """Standard deviation of a residual's sum."""
        own: Residual = getattr(self, name)
        theirs: Residual = getattr(whole, name)
        mine = own.about_mean(self.expected, self.expected_squares) * _freed(self.effective)
        pooled = theirs.about_mean(whole.expected, whole.expected_squares) * _freed(whole.effective)
        borrowed = pooled * self._part_of(whole)
        share = 1.0 if self.kind == ALL else self.effective / (self.effective + BORROWED)
        return math.sqrt(share * mine + (1 - share) * borrowed)

    def _part_of(self, whole: "CellSums") -> float:
        """How much of the variance of the whole such a cell would have.

        By units, as if a unit were off as one. Of a part of each unit that is too little: the first tokens of 64 are not 64
        times as steady as the 64, but 8 times less, which is what the number of tokens says.
        """
        by_units = self.expected_squares / whole.expected_squares
        if self.kind not in PARTS:
            return by_units
        return max(by_units, (self.expected / whole.expected) ** 2 * whole.tokens / self.tokens)


def _freed(units: float) -> float:
    """What a variance about a mean of so many is too small by."""
    return units / max(1.0, units - 1)


def _over(total: float, spread: float) -> float:
    return total / spread if spread > 0 else 0.0 if total <= 0 else math.inf


class _Rows(NamedTuple):
    """[unit or sequence, label]: what a kind of cell is summed from."""

    tokens: Floats
    ratio: Floats
    size: Floats
    expected: Floats


def cells_of(
    counted: Counted, tokens: Tokens, baseline: Baseline, expect: Callable[[str], Expected]
) -> list[CellSums]:
    """Every cell of the batch that has tokens."""
    by_part = _Rows(
        counted.tokens.sum(axis=2),
        counted.ratio.sum(axis=2),
        counted.size.sum(axis=2),
        baseline.expected(counted.tokens),
    )
    rare = counted.tokens.sum(axis=1)
    by_rarity = _Rows(
        rare, counted.ratio.sum(axis=1), counted.size.sum(axis=1), rare * np.array(baseline.scales)
    )
    whole = _Rows(*(values.sum(axis=1, keepdims=True) for values in by_part))
    units = _codes(tokens.groups[UNIT])[1] if UNIT in tokens.groups else None
    found: list[CellSums] = []
    for kind, labels, rows in (
        (ALL, (ALL,), whole),
        ("log p", LOG_P_LABELS, by_rarity),
        ("position", POSITION_LABELS, by_part),
        *(
            (kind, labels, _spread(whole, code, len(labels)))
            for kind, labels, code in _sequence_kinds(tokens)
        ),
    ):
        found += _sums(kind, labels, rows, units, partial(_cell, expect=expect, level=baseline.mean_abs))
    return found


def _sequence_kinds(tokens: Tokens) -> Iterator[tuple[str, tuple[str, ...], Ids]]:
    """Kinds of which every sequence has one label."""
    octaves, code = np.unique(np.frexp(tokens.counts.astype(np.float64))[1], return_inverse=True)
    yield "length", tuple(f"{2 ** (each - 1)}-{2**each - 1}" for each in octaves.tolist()), code
    if tokens.lag is not None:
        yield "lag", *_lags(tokens.lag[tokens.starts])
    for kind, labels in tokens.groups.items():
        if kind != UNIT:
            yield (kind, *_codes(labels))


def _lags(lag: Ids) -> tuple[tuple[str, ...], Ids]:
    """0, 1, and then by octaves."""
    octaves, code = np.unique(np.frexp(np.maximum(lag, 0).astype(np.float64))[1], return_inverse=True)
    names = tuple(str(each) if each < 2 else f"{2 ** (each - 1)}-{2**each - 1}" for each in octaves.tolist())
    return names, code


def _codes(labels: tuple[str, ...]) -> tuple[tuple[str, ...], Ids]:
    names, codes = np.unique(np.array(labels), return_inverse=True)
    return tuple(names.tolist()), codes.astype(np.int64)


def _spread(whole: _Rows, code: Ids, labels: int) -> _Rows:
    """Sequences in the column of their label."""
    chosen = np.equal(code[:, None], np.arange(labels))
    return _Rows(*(values * chosen for values in whole))


def _sums(
    kind: str,
    labels: tuple[str, ...],
    rows: _Rows,
    units: Ids | None,
    cell: Callable[[str, str, _Rows], CellSums],
) -> list[CellSums]:
    if units is not None:
        rows = _Rows(*(_by_unit(values, units) for values in rows))
    used = [place for place in range(len(labels)) if rows.tokens[:, place].any()]
    return [cell(kind, labels[place], _Rows(*(values[:, place] for values in rows))) for place in used]


def _by_unit(values: Floats, units: Ids) -> Floats:
    summed = np.zeros((int(units.max()) + 1, values.shape[1]))
    np.add.at(summed, units, values)
    return summed


def _cell(
    kind: str, label: str, rows: _Rows, expect: Callable[[str], Expected], level: float = 0.0
) -> CellSums:
    bias, factor = expect(f"{kind}={label}")
    tokens = float(rows.tokens.sum())
    expected = rows.expected * factor
    return CellSums(
        kind,
        label,
        tokens,
        int(np.count_nonzero(rows.tokens)),
        float(rows.ratio.sum()),
        float(rows.size.sum()),
        float(rows.expected.sum()),
        level * tokens,
        float(expected.sum()),
        float(expected @ expected),
        Residual.of(rows.ratio - bias * rows.tokens, expected),
        Residual.of(rows.size - expected, expected),
    )


def merged(parts: Iterator[list[CellSums]]) -> Mapping[str, CellSums]:
    """Cells of all ranks, by key."""
    found: dict[str, CellSums] = {}
    for cells in parts:
        for cell in cells:
            found[cell.key] = found[cell.key] + cell if cell.key in found else cell
    return found

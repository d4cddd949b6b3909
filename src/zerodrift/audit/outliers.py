"""Few tokens are far off and the others are right: whose are their values, and which requests do they fall on?

Each outlier is asked by itself. A value that is another entry of the same distribution was read at the wrong place; one
that belongs to another position or request was read too late or from a neighbour. By chance values agree too, the more
so the larger the vocabulary and the coarser the rounding: how often is measured by asking the same of each value and
the candidates of the *other* outliers, and what is no rarer than that is not said.
"""

from collections.abc import Callable, Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from zerodrift.audit.measure import Measurement
from zerodrift.backends.teacher import Teacher
from zerodrift.drift.floor import Floor
from zerodrift.drift.tokens import TokenTable
from zerodrift.sampler.processing import histories, processed_logprobs
from zerodrift.stats.arrays import Bools, Floats, Ids

MOST_OUTLIERS = 40
MOST_SEQUENCES = 16
"""Of which rows of the reference are computed anew."""
WITHIN = 4.0
"""σ: as near as that two values are one."""
BY_CHANCE = 1e-4
"""What chance does oftener is not said."""
MANY_TOKENS, MANY_REQUESTS = 0.3, 0.9
"""Where so many tokens of so many requests are off, nothing comes and goes."""


class Provenance(NamedTuple):
    """Of how many outliers the value is known to be which other one; None: of no more than chance would have."""

    looked_at: int
    another_entry: int | None
    another_position: int | None
    another_request: int | None


class Correlates(NamedTuple):
    """What all outliers share and other tokens do not; None: nothing."""

    since_request: int | None = None
    until_request: int | None = None
    prompts_from: int | None = None
    prompts_to: int | None = None
    outputs_from: int | None = None
    cached_only: bool | None = None


def sparse(outlier: Bools, sequence: Ids) -> bool:
    """Whether there are some, and not nearly everywhere."""
    if not outlier.any():
        return False
    requests = len(np.unique(sequence[outlier])) / len(np.unique(sequence))
    return bool(outlier.mean() < MANY_TOKENS or requests < MANY_REQUESTS)


def provenance(
    teacher: Teacher,
    measurements: Sequence[Measurement],
    table: TokenTable,
    outlier: Bools,
    floor: Floor,
    stop_ids: Sequence[int],
) -> Provenance:
    """Ask every outlier, or some of many."""
    # Requests in turn: forty tokens of one request would say what one says.
    chosen = sorted(np.flatnonzero(outlier & np.isfinite(table.reported)), key=lambda at: table.index[at])
    some: list[int] = []
    for at in chosen:
        known = {int(table.sequence[each]) for each in some}
        if len(some) < MOST_OUTLIERS and (int(table.sequence[at]) in known or len(known) < MOST_SEQUENCES):
            some.append(int(at))
    rows = _Rows(teacher, measurements, stop_ids)
    reported = table.reported[some]
    tolerance = WITHIN * floor.sigma(reported)
    asked = _Asked(reported, tolerance)
    return Provenance(
        len(some),
        asked.matches([_others(rows, table, at) for at in some]),
        asked.matches([_same_output(table, at) for at in some]),
        asked.matches([_other_outputs(rows, table, at) for at in some]),
    )


class _Asked(NamedTuple):
    """Values, and how near another one must be."""

    reported: Floats
    tolerance: Floats

    def matches(self, candidates: Sequence[Floats]) -> int | None:
        """How many are among their own candidates, where that is more than others' candidates would give."""
        number = len(self.reported)
        if number < 2:
            return None
        near = np.array([[self._near(i, others) for others in candidates] for i in range(number)])
        home = int(near.diagonal().sum())
        by_chance = (near.sum() - home + 1) / (number * (number - 1) + 1)
        return home if 2 * home >= number and _at_least(home, number, by_chance) < BY_CHANCE else None

    def _near(self, i: int, others: Floats) -> bool:
        return bool((np.abs(others - self.reported[i]) <= self.tolerance[i]).any())


def _at_least(count: int, number: int, chance: float) -> float:
    """Probability of `count` or more of `number`."""
    return sum(comb(number, k) * chance**k * (1 - chance) ** (number - k) for k in range(count, number + 1))


class _Rows:
    """Rows of the sampled distribution, by sequence and place in the output; each forward once."""

    def __init__(
        self, teacher: Teacher, measurements: Sequence[Measurement], stop_ids: Sequence[int]
    ) -> None:
        self._teacher, self._measurements, self._stop_ids = teacher, measurements, stop_ids
        self._known: dict[int, Callable[[int], Floats]] = {}

    def __call__(self, sequence: int, index: int) -> Floats | None:
        if not 0 <= sequence < len(self._measurements):
            return None
        completion = self._measurements[sequence].observed.completion
        if index >= len(completion.token_ids):
            return None
        if sequence not in self._known:
            self._known[sequence] = self._forward(sequence)
        return self._known[sequence](index)

    def _forward(self, sequence: int) -> Callable[[int], Floats]:
        observed = self._measurements[sequence].observed
        prompt, output = observed.completion.prompt_token_ids, observed.completion.token_ids
        (logits_TV,) = self._teacher.logits([prompt + output], [len(prompt)])

        def row(index: int) -> Floats:
            past = histories(prompt, output, index, index + 1)
            wide_1V = logits_TV[index : index + 1].double()
            values_V: Floats = processed_logprobs(wide_1V, observed.requested, past, self._stop_ids)[
                0
            ].numpy()
            return values_V

        return row


def _others(rows: _Rows, table: TokenTable, at: int) -> Floats:
    """Every other token's logprob in the same distribution."""
    row = rows(int(table.sequence[at]), int(table.index[at]))
    assert row is not None, "an outlier is a token of its own sequence"
    return np.delete(row, int(table.token[at]))


def _same_output(table: TokenTable, at: int) -> Floats:
    """Logprobs of the other tokens of the output."""
    mine = table.sequence == table.sequence[at]
    mine[at] = False
    values: Floats = table.contracted[mine]
    return values


def _other_outputs(rows: _Rows, table: TokenTable, at: int) -> Floats:
    """What other outputs have at the same place, and what the rows of its neighbours there make of this token."""
    there = (table.index == table.index[at]) & (table.sequence != table.sequence[at])
    beside = [rows(int(table.sequence[at]) + step, int(table.index[at])) for step in (-1, 1)]
    own = [row[int(table.token[at])] for row in beside if row is not None]
    return np.concatenate([table.contracted[there], own])


def correlates(
    measurements: Sequence[Measurement], requests: Ids, table: TokenTable, outlier: Bools
) -> Correlates:
    """Since when, and on which requests; `requests` is the number of the request of each sequence."""
    affected = np.unique(table.sequence[outlier])
    prompts = np.array([len(item.observed.completion.prompt_token_ids) for item in measurements])
    cached = np.array([bool(item.observed.completion.cached_tokens) for item in measurements])
    return Correlates(
        since_request=_edge(requests[affected], requests),
        until_request=_edge(-requests[affected], -requests, -1),
        prompts_from=_edge(prompts[affected], prompts),
        prompts_to=_edge(-prompts[affected], -prompts, -1),
        outputs_from=_edge(table.index[outlier], table.index),
        cached_only=True if _edge(cached[affected].astype(int), cached.astype(int)) == 1 else None,
    )


def _edge(affected: Ids, everyone: Ids, sign: int = 1) -> int | None:
    """The least of the affected, where so many would hardly all lie beyond it by chance."""
    least = affected.min()
    beyond = float((everyone >= least).mean())
    return int(sign * least) if beyond ** len(affected) < BY_CHANCE else None

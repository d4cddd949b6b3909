"""Rows of the embedding that are wrong: those of two tokens exchanged, or one that is another's, or nothing.

Whatever comes after such a token is wrong, and nothing else is. So tokens that stand before a right number are cleared, and
few are left that can account for every wrong one: each of those is given the rows of the others, of its neighbours, and none.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch

from zerodrift.audit.counterfactual.evaluate import CaseWindow
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.models.copies import sharing
from zerodrift.records.evidence import LocatedEvidence
from zerodrift.stats.arrays import Bools

MOST_SUSPECTS = 12
"""Of those that account for most: 66 pairs, and three rows for each alone."""


class Suspects(NamedTuple):
    """Tokens whose embeddings may be wrong, the likeliest first."""

    ids: tuple[int, ...]
    window: int
    """Off, with the fewest of them before what is off."""


def suspects(cases: Sequence[CaseWindow], off: Bools, right: Bools) -> Suspects | None:
    """`off` and `right`: of every judged token, and some are neither. None where some are off that no suspect stands before."""
    wrong: list[tuple[int, frozenset[int]]] = []
    cleared = set[int]()
    place = 0
    for number, case in enumerate(cases):
        for index in range(len(case.judged)):
            before = frozenset(case.prompt) | frozenset(case.output[: case.before + index])
            if off[place]:
                wrong.append((number, before))
            elif right[place]:
                cleared |= before
            place += 1
    left = [(number, before - cleared) for number, before in wrong]
    # What is wrong everywhere is not a row's.
    if not left or not right.any() or not all(ids for _, ids in left):
        return None
    counts = Counter(token for _, ids in left for token in ids)
    window, _ = min(left, key=lambda pair: len(pair[1]))
    likeliest = sorted(counts, key=lambda token: (-counts[token], token))
    # The window is decided by its own suspects: those go first.
    own = [token for token in likeliest if any(number == window and token in ids for number, ids in left)]
    chosen = [*own, *(token for token in likeliest if token not in own)]
    return Suspects(tuple(chosen[:MOST_SUSPECTS]), window)


def rows_of_others(model: Any, ids: Sequence[int]) -> Iterator[Variant]:
    """Exchanges first."""
    size = model.get_input_embeddings().weight.shape[0]
    for one, other in combinations(ids, 2):
        yield _variant("embeddings of tokens", (one, other), "exchanged", {one: other, other: one})
    for one in ids:
        for other in ids:
            if other != one:
                yield _variant("embedding of token", (one,), f"that of {other}", {one: other})
        for other in (one - 1, one + 1):
            if 0 <= other < size:
                yield _variant("embedding of token", (one,), f"that of {other}", {one: other})
                pair = (min(one, other), max(one, other))
                yield _variant("embeddings of tokens", pair, "exchanged", {one: other, other: one})
        yield _variant("embedding of token", (one,), "missing", {one: None})


def _variant(part: str, ids: tuple[int, ...], quantity: str, rows: dict[int, int | None]) -> Variant:
    where = LocatedEvidence(
        part=f"{part} {' and '.join(map(str, ids))}",
        quantity=quantity,
        estimate=1.0,
        low=1.0,
        high=1.0,
        neutral=0.0,
        r2=1.0,
    )
    return Variant(UNEXPLAINED, f"{where.part} {quantity}", partial(_with_rows, rows), located=where)


def _with_rows(rows: dict[int, int | None], model: Any) -> Any:
    """Looked up otherwise: a head that is tied to the embedding stays as it is."""
    changed = sharing(model)
    embedding = changed.get_input_embeddings()
    lookup: Callable[..., torch.Tensor] = embedding.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        read = ids.clone()
        for token, other in rows.items():
            read[ids == token] = token if other is None else other
        hidden = lookup(read)
        lost = [token for token, other in rows.items() if other is None]
        return hidden.masked_fill(torch.isin(ids, torch.tensor(lost, device=ids.device))[..., None], 0.0)

    embedding.forward = forward
    return changed

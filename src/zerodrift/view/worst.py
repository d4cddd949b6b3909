"""Which tokens disagree most, and what stands around them?

Ranked by |Δ|/σ, not by |Δ|: a rare token rounds further than a common one and would win every other ranking.
"""

from typing import NamedTuple

import numpy as np

from zerodrift.view.run_directory import Tokens
from zerodrift.view.visible import visible_token

MOST = 20
AROUND = 10
"""Tokens shown on either side, as far as the output goes; prompts are not in tokens.parquet."""


class Neighbour(NamedTuple):
    """One token of the context, as it can be shown."""

    text: str
    token: int
    worst: bool = False
    """It is the one that the context is about."""


class WorstToken(NamedTuple):
    """One token with both sides' numbers and its surroundings."""

    sequence: int
    position: int
    token: int
    reported: float
    contracted: float
    delta: float
    sigmas: float
    """|Δ| in units of what rounding alone does."""
    context: tuple[Neighbour, ...]
    begins: bool
    """The context begins where the output begins."""
    ends: bool


def worst(tokens: Tokens, most: int = MOST) -> tuple[WorstToken, ...]:
    """The `most` worst tokens that differ at all, worst first."""
    sigmas = np.abs(tokens.delta) / tokens.sigma
    order = np.argsort(-sigmas, kind="stable")[:most]
    return tuple(_in_context(tokens, int(row), float(sigmas[row])) for row in order if sigmas[row] > 0)


def _in_context(tokens: Tokens, row: int, sigmas: float) -> WorstToken:
    # Rows are ordered by sequence, so the sequence of a row is a range of rows.
    sequence = tokens.sequence[row]
    first = int(np.searchsorted(tokens.sequence, sequence, side="left"))
    last = int(np.searchsorted(tokens.sequence, sequence, side="right"))
    begin, end = max(first, row - AROUND), min(last, row + AROUND + 1)
    texts = tokens.text.slice(begin, end - begin).to_pylist()
    return WorstToken(
        sequence=int(sequence),
        position=int(tokens.position[row]),
        token=int(tokens.token[row]),
        reported=float(tokens.reported[row]),
        contracted=float(tokens.contracted[row]),
        delta=float(tokens.delta[row]),
        sigmas=sigmas,
        context=tuple(
            Neighbour(visible_token(text or ""), int(tokens.token[begin + offset]), begin + offset == row)
            for offset, text in enumerate(texts)
        ),
        begins=begin == first,
        ends=end == last,
    )

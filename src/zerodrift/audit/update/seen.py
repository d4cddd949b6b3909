"""What an engine reported after an update, and what is said of it. Torch-free."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zerodrift.core.completion import Completion
from zerodrift.records.evidence import LocatedEvidence
from zerodrift.stats.arrays import Floats

MOST = 0.95
"""An account of the update is believed if it removes this share of the difference …"""
NEARLY = 0.8
"""… or this share, and leaves no more than a healthy engine does: in bf16 rounding alone is a tenth of what a stale
prefix cache does (vLLM 0.26 on an H200: 88.9 % were removed, and half a gate was left)."""
HALF = 0.5
"""What explains less is not gone after."""
SETTLED = 0.99
"""Nothing else is tried once this share is gone: whatever was true left less than a thousandth in fp32."""


class Seen(NamedTuple):
    """Completions after the update, with what both sets of weights say about them."""

    completions: list[Completion]
    reported: Floats
    at_new: Floats
    at_old: Floats

    @property
    def gap(self) -> float:
        """Mean |Δ| against the new weights."""
        return float(np.abs(self.at_new - self.reported).mean())

    @property
    def slope(self) -> float:
        """Observed change regressed on the predicted one: 1 delivered, 0 stale."""
        predicted, observed = self.at_new - self.at_old, self.reported - self.at_old
        # A change of nothing has no slope: zero, and the probe is vacuous.
        return float(predicted @ observed / max(float(predicted @ predicted), 1e-300))

    def first(self, tokens: int) -> "Seen":
        """The first completions that have so many tokens between them, or all: a forward costs by the sequence."""
        totals = np.cumsum([len(completion.token_ids) for completion in self.completions])
        count = min(int(np.searchsorted(totals, tokens)) + 1, len(totals))
        end = int(totals[count - 1])
        return Seen(self.completions[:count], self.reported[:end], self.at_new[:end], self.at_old[:end])

    def worst(self) -> "Seen":
        """The completion that is furthest off: what is true of an update is true of it, and it costs one sequence."""
        edges = np.cumsum([0, *(len(completion.token_ids) for completion in self.completions)])
        off = np.abs(self.at_new - self.reported)
        spans = [slice(*ends) for ends in pairwise(edges.tolist())]
        number = int(np.argmax([off[span].mean() for span in spans]))
        span = spans[number]
        return Seen([self.completions[number]], self.reported[span], self.at_new[span], self.at_old[span])

    def explained(self, scores: Floats) -> float:
        """Share of the difference that is gone if the engine's own numbers should have been `scores`."""
        return 1 - float(np.abs(scores - self.reported).mean()) / self.gap


class UpdateExplanation(NamedTuple):
    """One way for the update to have gone wrong, and how much of the difference that explains."""

    cause: str
    message: str
    explained: float
    located: tuple[LocatedEvidence, ...] = ()

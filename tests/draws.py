"""Draws from distributions of one's own, as tables: what a sampler does wrong is put in beside what was asked for.

Distributions are as peaked as those of the built-in models: about 1.5 nats at temperature 1 over 512 ids.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from zerodrift.drift.tokens import RARE, TokenTable
from zerodrift.sampler.masses import draw_masses, recent_masses
from zerodrift.sampler.moments import surprise_moments

VOCAB = 512
STOP = 5
LENGTH = 32
Change = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Of the probabilities, given the place of each draw in its output."""


def distributions(
    rng: np.random.Generator, tokens: int, stop: float = 0.01, spread: float = 3.2
) -> np.ndarray:
    """Log-normal ones, in which some ids are heavy everywhere, with a stop token of this mass."""
    logits = spread * rng.standard_normal((tokens, VOCAB)) + 1.5 * rng.standard_normal(VOCAB)
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs[:, STOP] = 0.0
    probs *= (1 - stop) / probs.sum(axis=1, keepdims=True)
    probs[:, STOP] = stop
    return probs


class Source:
    """Rows of probabilities, from which many tables are drawn."""

    def __init__(self, probs: np.ndarray, length: int = LENGTH) -> None:
        self.probs = probs
        self.index = np.arange(len(probs)) % length
        self.sequence = np.arange(len(probs)) // length
        logprobs_TV = torch.from_numpy(probs).log()
        self.entropy, self.variance = (each.numpy() for each in surprise_moments(logprobs_TV))
        self.masses = draw_masses(logprobs_TV, torch.zeros(len(probs), dtype=torch.long), (STOP,))
        order = np.argsort(-probs, axis=1)
        ranked = np.take_along_axis(probs, order, axis=1)
        self.likelier = np.empty_like(probs)
        np.put_along_axis(self.likelier, order, ranked.cumsum(axis=1) - ranked, axis=1)

    def draw(self, rng: np.random.Generator, change: Change | None = None) -> TokenTable:
        """One token from each row, changed or not; a stop token does not end an output here."""
        used = self.probs if change is None else change(self.probs.copy(), self.index)
        bounds = used.cumsum(axis=1)
        picks = (bounds > rng.random(len(used))[:, None] * bounds[:, -1:]).argmax(axis=1)
        return self.table(picks, rng)

    def raced(self, rng: np.random.Generator, again: Callable[[int], bool]) -> TokenTable:
        """As vLLM draws: an arrival time for each token, and the first to arrive; at some places those of the place before."""
        times = rng.exponential(size=self.probs.shape)
        for row, index in enumerate(self.index.tolist()):
            if index and again(index):
                times[row] = times[row - 1]
        return self.table((times / np.maximum(self.probs, 1e-300)).argmin(axis=1), rng)

    def table(self, picks: np.ndarray, rng: np.random.Generator) -> TokenTable:
        """These tokens, as what came of the rows."""
        rows = np.arange(len(picks))
        recent, recurs = self._recent(picks)
        own, within = self.probs[rows, picks], rng.random(len(picks))
        contracted, others = np.log(own), own / (1 - self.probs[:, STOP])
        before = self.probs.cumsum(axis=1)[rows, picks] - own
        return TokenTable(
            sequence=self.sequence,
            index=self.index,
            position=self.index + 5,
            token=picks,
            reported=contracted,
            contracted=contracted,
            raw=contracted,
            entropy=self.entropy,
            variance=self.variance,
            by_likelihood=np.clip(self.likelier[rows, picks] + within * own, 0, 1),
            by_id=np.clip(before + within * own, 0, 1),
            sigma=np.full(len(picks), 1e-6),
            masses=replace(
                self.masses,
                stopped=picks == STOP,
                recent=recent,
                recurs=recurs,
                rarity=(others[:, None] < np.array(RARE)).sum(axis=1).astype(np.uint8),
            ),
            ends_told=True,
        )

    def _recent(self, picks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        others = self.probs.copy()
        others[:, STOP] = 0
        others /= np.maximum(others.sum(axis=1, keepdims=True), 1e-12)
        parts = [
            recent_masses(torch.from_numpy(others[at]), torch.from_numpy(picks[at]), ())
            for at in (self.sequence == number for number in range(self.sequence[-1] + 1))
        ]
        recent, recurs = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
        return recent.astype(np.float32), recurs

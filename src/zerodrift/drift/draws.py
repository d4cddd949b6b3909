"""Draws counted by what they are, against how often that was due: ids, probability, place in the output, the end.

Every set of tokens is known before the draw, so a bet on its count is fair (`stats.betting`). Winnings are averaged over
the sets of a kind, then over kinds: an average of e-values is one, and however many sets there are, a healthy engine
reaches 1/α with probability α at most.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from zerodrift.drift.tokens import ENDS, RANGES, RARE, RECENT, TokenTable
from zerodrift.stats.arrays import Floats
from zerodrift.stats.betting import Counts, count, log_mean_exp

Mask = NDArray[np.bool_]

PLACES: dict[str, tuple[int, float]] = {
    "": (0, math.inf),
    "as first token": (0, 1),
    "among tokens 2 to 4": (1, 4),
    "among tokens 5 to 16": (4, 16),
    "among tokens 17 to 64": (16, 64),
    "among tokens from 65 on": (64, math.inf),
}
"""Of the output; the first by itself, because engines make it in another place than the others."""
TAILS = tuple(range(1, 10))
"""Of the rarest and of the likeliest: one half, a quarter, … to 1/512 of every distribution."""
IDS, ONE_ID, RARITY, TAIL, GREEDY, STOP, AGAIN = KINDS = (
    *("ids", "one id", "rarity", "tail", "likeliest", "stop"),
    "again",
)


@dataclass(frozen=True)
class Sets:
    """Sets of one kind, and how often each came."""

    name: str
    words: tuple[str, ...]
    """What each set is."""
    counts: Counts
    sets: int
    """That the kind has; those beyond `words` were never possible, and their bets are worth their stake."""

    @cached_property
    def log_es(self) -> Floats:
        """Of each set."""
        return self.counts.log_e()

    @property
    def log_e(self) -> float:
        """Of the kind."""
        idle = self.sets - len(self.words)
        won = float(np.logaddexp.reduce(np.append(self.log_es, -math.inf)))
        return float(np.logaddexp(won, math.log(idle) if idle else -math.inf)) - math.log(self.sets)

    @property
    def loudest(self) -> str:
        """The set that won most, in words."""
        place = int(self.log_es.argmax())
        drawn, due = int(self.counts.drawn[place]), float(self.counts.due[place])
        return f"{self.words[place]} came {drawn:,} times where {due:,.1f} were due"


@dataclass(frozen=True)
class Draws:
    """All kinds."""

    kinds: tuple[Sets, ...]

    @property
    def log_e(self) -> float:
        """Log of the average over all."""
        return float(log_mean_exp(np.array([kind.log_e for kind in self.kinds])))

    @property
    def p_value(self) -> float:
        """1/E."""
        return min(1.0, math.exp(-self.log_e))

    @property
    def message(self) -> str:
        """What speaks most against the sampler."""
        return max(self.kinds, key=lambda kind: kind.log_e).loudest

    def of(self, name: str) -> Sets:
        """One of KINDS."""
        return next(kind for kind in self.kinds if kind.name == name)


def count_draws(table: TokenTable) -> Draws:
    """All draws of the table that have masses, each of which the parameters allow."""
    table = table.counted
    others = table.rows(~table.masses.stopped)
    # Where stop tokens were left out, nothing is known of them, nor of places among tokens that had them.
    told = table if table.ends_told else table.rows(np.zeros(len(table.token), dtype=np.bool_))
    kinds = _ids(others), _one_id(others), _rarity(others), _tail(told), _greedy(others), _stop(told)
    return Draws((*kinds, _again(others)))


def _ids(table: TokenTable) -> Sets:
    """Pieces of the vocabulary, from a half to a 32nd, and both its ends."""
    masses, size = table.masses, table.masses.vocab_size
    width = math.ceil(size / RANGES)
    words, members, weights = [], [], []
    for pieces in (32, 16, 8, 4, 2):
        joined = RANGES // pieces
        of = table.token // (joined * width)
        weights.append(masses.ranges.reshape(len(of), pieces, joined).sum(axis=2))
        members.append(of[:, None] == np.arange(pieces))
        words += [
            f"ids {piece * joined * width:,} to {(piece + 1) * joined * width - 1:,}"
            for piece in range(pieces)
        ]
    for place, end in enumerate(ENDS):
        weights.append(masses.ends[:, 2 * place : 2 * place + 2])
        members.append(np.stack([table.token < end, table.token >= size - end], axis=1))
        words += [f"the first {end} ids", f"the last {end} ids"]
    return Sets(IDS, tuple(words), count(np.hstack(members), np.hstack(weights)), len(words))


def _one_id(table: TokenTable) -> Sets:
    """Each id, wherever it is among the likeliest: those that are heavy are."""
    masses = table.masses
    ids, place = np.unique(masses.likeliest, return_inverse=True)
    # The draws that each id was among, in their order, one id after the other.
    flat = np.argsort(place.ravel(), kind="stable")
    mass = masses.likeliest_mass.ravel()[flat]
    hit = (table.token[:, None] == masses.likeliest).ravel()[flat]
    starts = np.searchsorted(place.ravel()[flat], np.arange(len(ids) + 1))
    words, parts = [], []
    for number, token in enumerate(ids.tolist()):
        part = slice(*starts[number : number + 2])
        # Betting begins when the id was due once, which is known beforehand: most of a vocabulary never is.
        late = np.cumsum(mass[part]) - mass[part] >= 1
        if token >= 0 and late.any():
            parts.append(count(hit[part][late, None], mass[part][late, None]))
            words.append(f"id {token:,}")
    if not parts:
        words, parts = ["any id"], [count(np.zeros((0, 1), np.bool_), np.zeros((0, 1)))]
    return Sets(ONE_ID, tuple(words), _stacked(parts), masses.vocab_size)


def _stacked(parts: Sequence[Counts]) -> Counts:
    return Counts(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _rarity(table: TokenTable) -> Sets:
    """Tokens by their probability: each half decade, and all that is rarer than one."""
    masses = table.masses
    rarer = np.hstack([np.ones((len(table.token), 1), np.float32), masses.rarer])
    bins = np.clip(rarer - np.hstack([masses.rarer, np.zeros((len(table.token), 1), np.float32)]), 0, 1)
    rarity = masses.rarity[:, None]
    edges = ("1", *(f"{limit:.2g}" for limit in RARE), "0")
    words = [f"tokens with p from {low} to {high}" for high, low in pairwise(edges)]
    words += [f"tokens with p under {limit:.2g}" for limit in RARE[:-1]]
    members = np.hstack([rarity == np.arange(len(RARE) + 1), rarity > np.arange(len(RARE) - 1)])
    return _by_place(RARITY, table, words, members, np.hstack([bins, masses.rarer[:, :-1]]))


def _tail(table: TokenTable) -> Sets:
    """The rarest and the likeliest part of every distribution, cut through a token where it must be."""
    parts = np.array([2.0**-tail for tail in TAILS])
    places = table.by_likelihood[:, None]
    words = [f"the rarest {part:.2%} of each distribution" for part in parts]
    words += [f"the likeliest {part:.2%} of each distribution" for part in parts]
    members = np.hstack([places >= 1 - parts, places < parts])
    return _by_place(TAIL, table, words, members, np.broadcast_to(np.tile(parts, 2), members.shape))


def _greedy(table: TokenTable) -> Sets:
    masses = table.masses
    member = (masses.likeliest[:, 0] == table.token)[:, None]
    return _by_place(GREEDY, table, ["the likeliest token"], member, masses.likeliest_mass[:, :1])


def _stop(table: TokenTable) -> Sets:
    masses = table.masses
    return _by_place(STOP, table, ["a stop token"], masses.stopped[:, None], masses.stop[:, None])


def _again(table: TokenTable) -> Sets:
    """Tokens that were drawn right before: noise that is shared between draws of one output favours them."""
    words = tuple("the token before" if last == 1 else f"one of the {last} tokens before" for last in RECENT)
    return Sets(AGAIN, words, count(table.masses.recurs, table.masses.recent), len(words))


def _by_place(
    name: str, table: TokenTable, words: list[str], members: Mask, masses: NDArray[np.floating]
) -> Sets:
    parts = [count(members[at], masses[at]) for at in _places(table)]
    said = [f"{word} {place}".rstrip() for place in PLACES for word in words]
    return Sets(name, tuple(said), _stacked(parts), len(said))


def _places(table: TokenTable) -> Iterator[Mask]:
    for first, end in PLACES.values():
        yield (table.index >= first) & (table.index < end)

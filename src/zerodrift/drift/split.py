"""Which property of a token or of its request parts those that are off from those that are right?

Of every property that is looked at and of every place to cut its order in two, the one under which the two shares of
tokens that are off are likeliest is taken. How often chance does as well, over all properties and places together, is
measured by the same search on tables in which whole prompts have exchanged what is off in them, and every output was
turned round: prompts may be off as a whole, and neighbouring tokens together, for reasons of their own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy

from zerodrift.drift.gates import Gates
from zerodrift.drift.tokens import TokenTable
from zerodrift.stats.arrays import Bools, Floats, Ids

ALPHA = 1e-3
"""Chance of a split where there is none, over all properties."""
PERMUTATIONS = 1999
ROUND = 250
"""Tables by chance at a time: most searches are over after the first."""
CELLS = 2**20
"""Tokens of such tables that are held at once: some 40 MB."""
MOST_TOKENS = 16_384
MOST_CUTS = 64
"""Places of each property that are looked at in a table by chance, and in the true one beside those."""
MOST_OUTSIDE = 0.02
"""Share of the other tokens that may be off: rounding has tails."""
LEAST_INSIDE = 0.3
"""Share of tokens inside that must be: what is certain stays so, whatever is wrong."""
LEAST_PROMPTS = 0.9
"""Prompts of which some token is off inside, as a share of those that would be if none of them were spared."""
LEAST_JUMP = 4.0
"""By which |Δ| changes at the cut, quarter against quarter: what grows gradually passes the gate somewhere too, and
grows by less than half from one quarter to the next if it grows with length."""
ALIKE = 3.0
"""Nats: properties that part the tokens as well as the best are not told from it."""


class Property(NamedTuple):
    """One number of each token, or of its request."""

    name: str
    values: Floats


class Cut(NamedTuple):
    """A place in the order of one property."""

    name: str
    above: bool
    """Off are the tokens from it on; else those up to it."""
    inside: float
    """The value next to it among those that are off, …"""
    outside: float
    """… and among the others: what was asked does not tell where between these it lies."""
    gain: float
    """Nats over no cut."""

    def holds(self, values: Floats) -> Bools:
        """Which values lie inside."""
        chosen: Bools = values >= self.inside if self.above else values <= self.inside
        return chosen


class Split(NamedTuple):
    """The cut that parts the tokens best, and how well."""

    cut: Cut
    alike: tuple[Cut, ...]
    """Of other properties, that part them as well."""
    off_inside: int
    tokens_inside: int
    off_outside: int
    tokens_outside: int
    share: float
    """Of Σ|Δ| that lies inside."""
    p: float
    """How often chance does as well, over all properties that were looked at."""

    @property
    def cuts(self) -> dict[str, Cut]:
        """By property, all that part the tokens as well as any."""
        return {each.name: each for each in (self.cut, *self.alike)}


class JudgedTokens(NamedTuple):
    """Tokens, each with how far it is off and what it belongs to."""

    size: Floats
    """|Δ|"""
    off: Bools
    sequence: Ids
    prompt: Ids
    """Sequences of one prompt are no two witnesses."""

    def rows(self, chosen: Bools) -> "JudgedTokens":
        """Some of them."""
        return JudgedTokens(self.size[chosen], self.off[chosen], self.sequence[chosen], self.prompt[chosen])


def off_tokens(table: TokenTable, gates: Gates) -> Bools:
    """Tokens whose |Δ| is more than a healthy token's ever was."""
    off: Bools = ~(np.abs(np.where(np.isfinite(table.contracted), table.delta, np.inf)) <= gates.outlier)
    return off


def find_split(
    tokens: JudgedTokens,
    properties: Sequence[Property],
    rng: np.random.Generator,
    alpha: float = ALPHA,
    least_prompts: int = 2,
) -> Split | None:
    """The property that parts them, or None: none does nearly so, or chance does it as well."""
    chosen = _some(tokens, rng)
    tokens = tokens.rows(chosen)
    size, off = tokens.size, tokens.off
    varying = [each._replace(values=each.values[chosen]) for each in properties]
    varying = [each for each in varying if len(np.unique(each.values)) > 1]
    if not varying or not off.any() or off.all():
        return None
    cuts = sorted((likeliest_cut(off, each) for each in varying), key=lambda cut: -cut.gain)
    best, values = cuts[0], {each.name: each.values for each in varying}
    inside = best.holds(values[best.name])
    if not _parts(tokens, inside, values[best.name], least_prompts):
        return None
    p = _by_chance(tokens, varying, rng, alpha)
    alike = tuple(cut for cut in cuts[1:] if cut.gain >= best.gain - ALIKE)
    counts = (int(off[inside].sum()), int(inside.sum()), int(off[~inside].sum()), int((~inside).sum()))
    share = float(size[inside].sum() / size.sum())
    return Split(best, alike, *counts, share, p) if p <= alpha else None


def likeliest_cut(off: Bools, of: Property) -> Cut:
    """Where the shares of tokens that are off differ most, above and below."""
    values, place = np.unique(of.values, return_inverse=True)
    count, hits = np.bincount(place), np.bincount(place, weights=off)
    before, below = (np.cumsum(each)[:-1].astype(np.float64) for each in (count, hits))
    gain = cut_gains(below, before, float(off.sum()), len(off))
    best = int(gain.argmax())
    total, every = float(off.sum()), len(off)
    above = bool(below[best] / before[best] < (total - below[best]) / (every - before[best]))
    first, last = float(values[best + 1]), float(values[best])
    return Cut(of.name, above, *((first, last) if above else (last, first)), float(gain[best]))


def cut_gains(below: Floats, before: Floats, hits: Any, tokens: int) -> Floats:
    """Log-likelihood of each cut over none: so many of the tokens before it are off, and so many of all."""
    gains: Floats = (
        _surely(below, before) + _surely(hits - below, tokens - before) - _surely(hits, float(tokens))
    )
    return gains


def _surely(hits: Any, tokens: Any) -> Any:
    """Log-likelihood of so many hits among tokens, at their own share."""
    share = np.asarray(hits, dtype=np.float64) / tokens
    return xlogy(hits, share) + xlogy(tokens - hits, 1 - share)


def _some(tokens: JudgedTokens, rng: np.random.Generator) -> Bools:
    """All tokens, or those of as many sequences as can be looked at two thousand times."""
    count = np.bincount(tokens.sequence)
    order = rng.permutation(np.unique(tokens.sequence))
    kept = order[np.cumsum(count[order]) <= MOST_TOKENS]
    chosen: Bools = np.isin(tokens.sequence, kept)
    return chosen


def _parts(tokens: JudgedTokens, inside: Bools, values: Floats, least: int) -> bool:
    """Nearly all that is off is inside, nearly every prompt inside is off, and |Δ| jumps at the cut."""
    size, off = tokens.size, tokens.off
    if off[~inside].mean() > MOST_OUTSIDE or off[inside].mean() < LEAST_INSIDE:
        return False
    # Of prompts with one token inside, as many are off as tokens are.
    inside_of = np.bincount(tokens.prompt[inside])
    due = (1 - (1 - off[inside].mean()) ** inside_of).sum()
    if len(np.unique(tokens.prompt[inside & off])) < max(least, LEAST_PROMPTS * due):
        return False
    near_in, near_out = (_nearest(size[side], values[side], values[~side]) for side in (inside, ~inside))
    return bool(np.median(near_in) >= LEAST_JUMP * np.median(near_out))


def _nearest(size: Floats, values: Floats, others: Floats) -> Floats:
    """|Δ| of the quarter that is nearest to the cut."""
    away = np.abs(values - (others.max() if others.max() < values.min() else others.min()))
    near: Floats = size[away <= np.quantile(away, 0.25)]
    return near


class _Bins(NamedTuple):
    """Tokens by the pieces between the cuts of one property."""

    member: Floats
    """[token, piece]"""
    before: Floats


def _by_chance(
    tokens: JudgedTokens, properties: Sequence[Property], rng: np.random.Generator, alpha: float
) -> float:
    """How often tables without a split have a cut as good; at least as often where that is too often anyway."""
    bins = [_binned(each) for each in properties]
    # At the same places as by chance, of which there may be fewer than a property has.
    gain = max(float(_best_gains(tokens.off[None].astype(np.float32), each)[0]) for each in bins)
    shuffled = _Shuffled(tokens)
    hits = done = 0
    while done < PERMUTATIONS and (1 + hits) / (1 + PERMUTATIONS) <= alpha:
        rows = min(ROUND, max(1, CELLS // len(tokens.off)), PERMUTATIONS - done)
        tables = shuffled(rng, rows)
        best = np.max([_best_gains(tables, each) for each in bins], axis=0)
        hits, done = hits + int((best >= gain - 1e-9).sum()), done + rows
    return (1 + hits) / (1 + done)


def _binned(of: Property) -> _Bins:
    values = np.unique(of.values)
    if len(values) > MOST_CUTS:
        values = np.unique(np.quantile(of.values, np.linspace(0, 1, MOST_CUTS), method="lower"))
    piece = np.searchsorted(values, of.values, side="right") - 1
    member = (piece[:, None] == np.arange(len(values))).astype(np.float32)
    return _Bins(member, np.cumsum(member.sum(axis=0))[:-1].astype(np.float64))


def _best_gains(tables: NDArray[np.float32], bins: _Bins) -> Floats:
    below = np.cumsum(tables @ bins.member, axis=1)[:, :-1].astype(np.float64)
    hits = tables.sum(axis=1, dtype=np.float64)[:, None]
    if not below.shape[1]:
        return np.zeros(len(tables))
    best: Floats = cut_gains(below, bins.before, hits, tables.shape[1]).max(axis=1)
    return best


class _Shuffled:
    """What is off, given to other prompts; each output turned round."""

    def __init__(self, tokens: JudgedTokens) -> None:
        _, self._sequence = np.unique(tokens.sequence, return_inverse=True)
        order = np.argsort(self._sequence, kind="stable")
        self._length = np.bincount(self._sequence)
        starts = np.cumsum(self._length) - self._length
        self._place = np.empty(len(order), dtype=np.int64)
        self._place[order] = np.arange(len(order)) - np.repeat(starts, self._length)
        # [sequence, place in its output]; what lies behind its end is never read.
        self._off = np.zeros((len(starts), self._length.max()), dtype=np.bool_)
        self._off[self._sequence, self._place] = tokens.off
        _, self._prompt = np.unique(tokens.prompt[order[starts]], return_inverse=True)
        members = [np.flatnonzero(self._prompt == prompt) for prompt in range(self._prompt.max() + 1)]
        self._samples = np.array([len(each) for each in members])
        self._members = np.array([np.resize(each, self._samples.max()) for each in members])
        self._number = np.zeros(len(starts), dtype=np.int64)
        for each in members:
            self._number[each] = np.arange(len(each))

    def __call__(self, rng: np.random.Generator, rows: int) -> NDArray[np.float32]:
        """[table, token]: 1 where it is off."""
        others = rng.permuted(np.tile(np.arange(len(self._samples)), (rows, 1)), axis=1)[:, self._prompt]
        given = self._members[others, self._number % self._samples[others]]
        length = self._length[given]
        turned = (rng.random(given.shape) * length).astype(np.int64)
        place = (self._place + turned[:, self._sequence]) % length[:, self._sequence]
        tables: NDArray[np.float32] = self._off[given[:, self._sequence], place].astype(np.float32)
        return tables

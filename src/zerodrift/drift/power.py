"""What would these tests have caught? For each kind of deviation the smallest that raises the alarm 19 times in 20.

Worked out for the very draws that were judged: their number, their entropies, how often each set was due. A deviation
smaller than what stands here may be there, and a PASS says nothing about it.
"""

import math

import numpy as np
from scipy import special

from zerodrift.drift.draws import GREEDY, IDS, KINDS, ONE_ID, PLACES, RARITY, STOP, TAIL, TAILS, Draws, Sets
from zerodrift.drift.reach import Reach
from zerodrift.drift.tokens import LIKELIEST, RARE, TokenTable
from zerodrift.records.evidence import Power
from zerodrift.stats.arrays import Floats
from zerodrift.stats.betting import FACTORS, MOST, Counts

MISSED = 0.05
"""Chance of overlooking what a line says would be seen, at most."""
BETAS = np.geomspace(1e-4, 4.0, 1000)
GAUSSIAN = 25.0
"""Variance from which a sum of draws is one, to half a draw."""
SHARES = np.linspace(0.01, 1.0, 100)
"""Of requests whose first token is not drawn, or by which a stop token is too rare."""


def power_of(draws: Draws, table: TokenTable, *, level: float, tests: int) -> tuple[Power, ...]:
    """One line for each kind; `level` is that of the bets, and that of `tests` tests together."""
    counted = table.counted
    needed = {kind.name: -math.log(level) + math.log(len(KINDS) * kind.sets) for kind in draws.kinds}
    return (
        _temperature(table, level / tests, "lower temperature", BETAS),
        _temperature(table, level / tests, "higher temperature", -BETAS[BETAS < 1]),
        _never(
            "ids never drawn", "1/32 of the vocabulary or more never drawn", len(counted.token), needed[IDS]
        ),
        # Betting on one id begins when it was due once.
        _never(
            "one id never drawn",
            f"one id of the {LIKELIEST} likeliest never drawn",
            len(counted.token),
            needed[ONE_ID] + 1,
        ),
        _rare(draws.of(RARITY), needed[RARITY]),
        _tail(draws.of(TAIL), needed[TAIL]),
        _first(counted, draws.of(GREEDY), needed[GREEDY]),
        _stop(counted, draws.of(STOP), needed[STOP]),
    )


def positions_asked(table: TokenTable, context: int, stable: Reach | None) -> Power:
    """How far into the context tokens were compared at all, and up to where they are right."""
    farthest = int(table.position.max()) + 1
    message = f"fault of far positions: if it shows before {farthest:,} of {context:,}"
    if farthest < context:
        message += " (farther: --set validation.position_probes=[1.0])"
    if stable is not None:
        message += f"; {stable.message}"
    return Power(name="far positions", message=message, seen_from=float(farthest))


def _temperature(table: TokenTable, level: float, name: str, betas: Floats) -> Power:
    """A temperature of 1/(1 + β) times the one asked for: the mean of log p moves by βκ₂ + β²κ₃/2, its variance to
    κ₂ + βκ₃. The third cumulant is that of the draws themselves."""
    second = float(table.variance.sum())
    third = float(((table.contracted + table.entropy) ** 3).sum())
    moved = np.abs(betas * second + betas**2 * third / 2)
    spread = np.sqrt(np.maximum(second + betas * third, 0.1 * second))
    limit = -float(special.ndtri(level / 2)) * math.sqrt(second)
    seen = moved - limit >= -float(special.ndtri(MISSED)) * spread
    if not seen.any():
        return Power(name=name, message=f"{name}: would not be seen")
    factor = float(1 / (1 + betas[seen.argmax()]))
    return Power(name=name, message=f"{name}: from ×{factor:.2f}", seen_from=factor)


def _never(name: str, what: str, tokens: int, needed: float) -> Power:
    """A set of one mass in every draw, with one bet of all on it: Π 1/(1 - q)."""
    mass = 1 - math.exp(-(needed + math.log(len(FACTORS))) / max(1, tokens))
    return Power(name=name, message=f"{what}: from {_percent(mass)} of the mass", seen_from=mass)


def _rare(kind: Sets, needed: float) -> Power:
    """Sets of one tail under each limit, over all places: the smallest limit whose tokens are missed."""
    name, what = "rare tokens never drawn", "rare tokens never drawn"
    never = kind.counts.log_e(np.zeros(len(kind.words)))
    first = len(RARE) + 1
    seen = [
        (limit, float(kind.counts.due[first + at] / max(1, kind.counts.draws[first + at])))
        for at, limit in enumerate(RARE[:-1])
        if never[first + at] >= needed
    ]
    if not seen:
        return Power(name=name, message=f"{what}: would not be seen")
    limit, mass = min(seen)
    message = f"{what}: if all under p = {limit:.2g} are missing ({_percent(mass)} of the mass)"
    return Power(name=name, message=message, seen_from=limit)


def _tail(kind: Sets, needed: float) -> Power:
    name, what = "tail cut off", "rarest part of each distribution cut off, as by top-p"
    never = kind.counts.log_e(np.zeros(len(kind.words)))
    seen = [2.0**-tail for at, tail in enumerate(TAILS) if never[at] >= needed]
    if not seen:
        return Power(name=name, message=f"{what}: would not be seen")
    return Power(name=name, message=f"{what}: from {_percent(min(seen))}", seen_from=min(seen))


def _first(table: TokenTable, kind: Sets, needed: float) -> Power:
    """The likeliest token taken, not drawn, in a share of requests."""
    name, what = "first token taken", "first token taken as the likeliest, not drawn"
    masses = table.masses
    first = (table.index == 0) & ~masses.stopped
    q = np.minimum(masses.likeliest_mass[first, 0].astype(np.float64), MOST)
    at = list(PLACES).index("as first token")
    for share in SHARES:
        fewest = _least(q + share * (1 - q))
        if _log_e(kind.counts, at, fewest) >= needed:
            return Power(name=name, message=f"{what}: from {share:.0%} of outputs", seen_from=float(share))
    return Power(name=name, message=f"{what}: would not be seen in {int(first.sum())} outputs")


def _stop(table: TokenTable, kind: Sets, needed: float) -> Power:
    """A stop token whose odds are multiplied by less than one."""
    name, what = "stop token too rare", "stop token too rare"
    if not table.ends_told:
        return Power(name=name, message=f"{what}: not judged, because outputs end without theirs")
    q = np.minimum(table.masses.stop.astype(np.float64), MOST)
    due = float(q.sum())
    for factor in SHARES[::-1] - SHARES[0]:
        most = most_drawn(factor * q / (1 - q + factor * q))
        if _log_e(kind.counts, 0, most) >= needed:
            message = f"{what}: from {factor:.2f} times the odds" if factor else f"{what}: if it never comes"
            return Power(name=name, message=f"{message} ({due:.1f} were due)", seen_from=float(factor))
    return Power(name=name, message=f"{what}: would not be seen ({due:.1f} were due)")


def _log_e(counts: Counts, place: int, drawn: float) -> float:
    might = np.array(counts.drawn, dtype=np.float64)
    might[place] = drawn
    return float(counts.log_e(might)[place])


def _least(q: Floats) -> float:
    """What a sum of independent draws exceeds with 95 %: certain where each is, Gaussian with half a draw elsewhere."""
    spread = math.sqrt(float((q * (1 - q)).sum()))
    return max(0.0, math.floor(float(q.sum()) + float(special.ndtri(MISSED)) * spread))


def most_drawn(q: Floats) -> float:
    """What a sum of draws stays at or below with 95 %: Poisson's quantile where they are rare, a Gaussian's elsewhere."""
    mean, variance = float(q.sum()), float((q * (1 - q)).sum())
    if variance > GAUSSIAN:
        return math.ceil(mean - float(special.ndtri(MISSED)) * math.sqrt(variance))
    counts = np.arange(int(mean + 10 * math.sqrt(mean + 1)) + 2)
    return float(counts[np.searchsorted(special.pdtr(counts, mean), 1 - MISSED)])


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 99.5 else f"{percent:.2g} %"

"""Since when? A bet on every step as the first bad one, side by side, with evidence that holds whenever it is read.

One e-process that starts with the recording forgets how to win while all is well: after fifty healthy steps its
cautious accounts alone are left, and a fault is seen dozens of steps late. So a fresh one starts at every step k, with
the share w_k = 1 / (k (k + 1)) of the stake:

    E_t = Σ_{k<=t} w_k E_t^(k) + 1 / (t + 1)        the last term has not been bet yet

The shares add up to one and every E^(k) is an e-process of the same null, so E is one too: P(sup E >= 1/α) <= α if
nothing is wrong, at every stopping time. The k whose bet has won most is the estimate of when it began.
"""

import math
from typing import NamedTuple

import msgspec

from zerodrift.stats.sequential import EProcess

MOST_CANDIDATES = 8
"""Bets held at once; the poorest are let go, which can only lower E. A thousand steps then cost 0.1 s, not 6."""


class Candidate(NamedTuple):
    """The bet that step `start` (counted from 0) is the first bad one."""

    start: int
    bet: EProcess

    @property
    def log_worth(self) -> float:
        """Log of what it adds to E: its wealth times its share, with k = start + 1."""
        return self.bet.log_e - math.log((self.start + 1) * (self.start + 2))


class Onset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state after some steps; `update` returns the next one and leaves this as it was."""

    fresh: EProcess
    """The bet as it starts: its null is what "nothing is wrong" means."""
    steps: int = 0
    """Values so far that a bet may start with."""
    candidates: tuple[Candidate, ...] = ()
    log_e: float = 0.0
    log_peak: float = 0.0
    """The greatest log E so far."""
    log_best: float = 0.0
    """The greatest log wealth that any candidate ever had."""
    began: int | None = None
    """Start of the candidate that had it: the likeliest first bad step, however sure that is; None before any won."""

    def update(self, z: float, *, opens: bool = True) -> "Onset":
        """The state after one more value; `opens` says whether it is the first of a step, where a change may begin."""
        fresh = (Candidate(self.steps, self.fresh),) if opens or not self.steps else ()
        candidates = [
            Candidate(candidate.start, candidate.bet.update(z)) for candidate in (*self.candidates, *fresh)
        ]
        candidates = sorted(candidates, key=lambda each: -each.bet.log_e)[:MOST_CANDIDATES]
        steps = self.steps + len(fresh)
        log_e = _log_sum([-math.log(steps + 1), *(candidate.log_worth for candidate in candidates)])
        best = candidates[0]
        # Without the shares: they favour early steps, and would date a fault of step 2 to step 1.
        won = best.bet.log_e > self.log_best
        return msgspec.structs.replace(
            self,
            steps=steps,
            candidates=tuple(candidates),
            log_e=log_e,
            log_peak=max(self.log_peak, log_e),
            log_best=best.bet.log_e if won else self.log_best,
            began=best.start if won else self.began,
        )

    def alarm(self, alpha: float) -> bool:
        """E has reached 1/α at some time, which happens with probability at most α if nothing is wrong."""
        return self.log_peak >= -math.log(alpha)


def _log_sum(logs: list[float]) -> float:
    top = max(logs)
    return top + math.log(math.fsum(math.exp(value - top) for value in logs))

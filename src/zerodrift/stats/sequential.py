"""Has the drift risen, asked again after every step?

Two detectors of a rise in z, a statistic with mean 0 and variance 1 while nothing is wrong. Each is a frozen
value: `update` returns the next state and leaves this one as it was, so that a monitor can be replayed, forked
and stored. Both are one-sided: less drift than usual is no alarm.

    Cusum     S ← max(0, S + clip(z) - k), alarm at S >= h           fastest for a lasting shift of 2k
    EProcess  product of fair bets on clip(z), alarm at 1/α          P(ever a false alarm) <= α, no matter
                                                                     how often or when one looks

Clipping keeps one broken token from raising an alarm that only a lasting change should raise.
"""

import math
from typing import Final

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue, NonFinite


def _check_step(z: float) -> None:
    require.real(NonFinite, "z", z, "a step without a value is left out, never replaced", -math.inf)


def _check_positive(name: str, value: float) -> None:
    require.real(InvalidValue, name, value, "it must be a positive number", 0)
    if value == 0:
        raise InvalidValue(f"{name} is 0; it must be a positive number")


def _clipped(z: float, clip: float) -> float:
    return min(max(z, -clip), clip)


class Cusum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Page's cumulative sum, with each step clipped.

    With the defaults one alarm in about 19,000 steps is false (Siegmund: (e^{2kb} - 2kb - 1) / 2k², b = h + 1.166),
    a shift of two standard deviations is found in about 6 steps, and no single value can raise the
    alarm from rest.
    """

    allowance: float = 0.5
    """k: half the shift that should be found."""
    threshold: float = 8.0
    """h: evidence in standard deviations that makes an alarm."""
    clip: float = 4.0
    score: float = 0.0
    steps: int = 0
    last_zero: int = 0
    """The step after which the score left zero for good: the estimate of when a change happened."""

    def __post_init__(self) -> None:
        """Settings that could never alarm, or always would, are refused."""
        require.real(InvalidValue, "allowance", self.allowance, "it is half the shift to find", 0)
        require.real(InvalidValue, "clip", self.clip, "it bounds one step", 0)
        require.real(InvalidValue, "score", self.score, "it starts at 0", 0)
        if self.clip <= self.allowance:
            raise InvalidValue(
                f"clip {self.clip} is not above the allowance {self.allowance}, so the sum could never rise"
            )
        _check_positive("threshold", self.threshold)

    def update(self, z: float) -> "Cusum":
        """The state after one more value."""
        _check_step(z)
        score = max(0.0, self.score + _clipped(z, self.clip) - self.allowance)
        steps = self.steps + 1
        last_zero = self.last_zero if score else steps
        return msgspec.structs.replace(self, score=score, steps=steps, last_zero=last_zero)

    @property
    def alarm(self) -> bool:
        """The evidence has reached the threshold."""
        return self.score >= self.threshold


_FRACTIONS: Final = (0.9, 0.5, 0.25, 0.1, 0.05, 0.02)
"""Shares of the greatest safe stake, bet side by side: λ from 0.02/c to 0.9/c, each the best stake for a shift of
about λ standard deviations. Not knowing which one costs log 6 = 1.8 nats of evidence."""


class EProcess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Betting against "the mean of clip(z), given the past, is at most `null_mean`" (Waudby-Smith & Ramdas 2024).

        E_t = mean over fractions f of  Π_s (1 + λ_f (clip(z_s) - m)),   λ_f = f / (c + m)

    Every factor has conditional mean <= 1 under the null and every stake is fixed beforehand, so E is a
    nonnegative supermartingale and, by Ville's inequality, P(sup E >= 1/α) <= α: under dependence, at every
    stopping time. The null is about the clipped value; for x in [0, 1] use z = 2x - 1 with clip 1.
    """

    clip: float = 4.0
    null_mean: float = 0.0
    steps: int = 0
    log_wealths: tuple[float, ...] = (0.0,) * len(_FRACTIONS)
    """One account per fraction."""
    log_peak: float = 0.0
    """The greatest log E so far; it starts at log 1."""

    def __post_init__(self) -> None:
        """A null mean at or beyond the clip leaves nothing to bet on."""
        _check_positive("clip", self.clip)
        require.real(
            InvalidValue, "null_mean", self.null_mean, "it lies within the clip", -self.clip, self.clip
        )
        if abs(self.null_mean) == self.clip:
            raise InvalidValue(f"null_mean {self.null_mean} is the clip itself; it must lie inside")
        if len(self.log_wealths) != len(_FRACTIONS):
            raise InvalidValue(f"{len(self.log_wealths)} accounts for {len(_FRACTIONS)} stakes; start afresh")

    def update(self, z: float) -> "EProcess":
        """The state after one more value."""
        _check_step(z)
        gain = (_clipped(z, self.clip) - self.null_mean) / (self.clip + self.null_mean)
        wealths = tuple(
            wealth + math.log1p(fraction * gain)
            for wealth, fraction in zip(self.log_wealths, _FRACTIONS, strict=True)
        )
        peak = max(self.log_peak, _log_mean_exp(wealths))
        return msgspec.structs.replace(self, steps=self.steps + 1, log_wealths=wealths, log_peak=peak)

    @property
    def log_e(self) -> float:
        """log E now; E is how many times the bet's stake it is worth."""
        return _log_mean_exp(self.log_wealths)

    @property
    def p_value(self) -> float:
        """1 / sup E: valid whenever it is read."""
        return math.exp(-self.log_peak)

    def alarm(self, alpha: float) -> bool:
        """E has reached 1/α at some time, which happens with probability at most α under the null."""
        require.real(InvalidValue, "alpha", alpha, "it is a probability of false alarms", 0, 1)
        _check_positive("alpha", alpha)
        return self.log_peak >= -math.log(alpha)


def _log_mean_exp(logs: tuple[float, ...]) -> float:
    top = max(logs)
    return top + math.log(math.fsum(math.exp(value - top) for value in logs) / len(logs))

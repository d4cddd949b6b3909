"""Rewards: are they this batch's, and are they like the ones before?

A reward belongs to one output, by its id and the digest of its tokens. One that says otherwise is refused and counted,
and its batch is not trained on: a swap leaves every distribution as it was, so no test of values could see it.

Rewards are meant to move, since learning is. So a shift against the window before warns and never trips by itself;
against rollouts of a reference on the same prompts (`Monitor.compare_rewards`) nothing but the engine can differ.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from scipy import special

from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.decision import Code, Reason, RewardView
from zerodrift.monitor.host import host, numbers
from zerodrift.stats.arrays import Floats, Ids
from zerodrift.stats.summaries import Summary, mean_shift
from zerodrift.stats.twosample import energy_distance

SHIFT_P = 1e-5
"""Of the mean, asked at every step: one false warning in 100,000 healthy steps, were rewards independent."""
TEST_P = 1e-3
"""Of the distribution, asked every `check_interval_steps`."""
LEAST = 20
"""Values on either side."""
LARGEST = 1e150
"""Of a reward: squares of larger ones are no numbers any more, so that no state could hold their spread."""


class Output(NamedTuple):
    """Which output a sequence is."""

    id: str
    digest: str


class BoundReward(NamedTuple):
    """A reward that says which output it was given for."""

    id: str
    digest: str
    value: float


def digest_of(token_ids: Sequence[int]) -> str:
    """Of an output's tokens: the same wherever it is computed."""
    ids = host("token_ids", token_ids)
    # An empty list has no type.
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu") or ids.dtype == np.uint64:
        raise InvalidValue(
            f"token_ids are {token_ids!r:.60}; a digest is of one output's ids, a list of whole numbers"
        )
    return xxhash.xxh3_128_hexdigest(ids.astype("<i8").tobytes())


class Rewards(NamedTuple):
    """One batch's, as far as they can be believed."""

    values: Floats
    trips: tuple[Reason, ...] = ()
    misbound: int = 0


def read(given: Any, outputs: Sequence[Output] | None, rows: int, kept: Ids) -> Rewards:
    """The values of sequences that have tokens, in their order."""
    bound = isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], BoundReward)
    if outputs is not None and rows and not bound:
        raise InvalidValue(
            "outputs were given beside rewards that are bound to none, so nothing tells whose they are: bind them, or leave outputs out"
        )
    values = _values(given, bound=bound)
    if values.shape != (rows,):
        raise InvalidValue(f"rewards have shape {values.shape} for {rows} sequences; give one per sequence")
    trips: tuple[Reason, ...] = ()
    misbound = _misbound(given, outputs) if bound else 0
    if misbound:
        message = f"{misbound} rewards were given for other outputs (id or digest differ); they are refused"
        trips = (Reason(code=Code.REWARD_MISBOUND, message=message, value=float(misbound)),)
    usable = np.abs(values) <= LARGEST
    if not usable.all():
        message = f"{int((~usable).sum())} rewards are not finite, or beyond {LARGEST:g}"
        return Rewards(np.zeros(0), (*trips, Reason(code=Code.REWARD_NOT_FINITE, message=message)), misbound)
    return Rewards(np.zeros(0) if misbound else values[kept], trips, misbound)


def _values(given: Any, *, bound: bool) -> Floats:
    if bound and not all(isinstance(each, BoundReward) for each in given):
        raise InvalidValue("some rewards are bound to an output and some are not; bind all, or none")
    try:
        return np.asarray(
            [each.value for each in given] if bound else host("rewards", given), dtype=np.float64
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValue(f"rewards cannot be read as numbers ({error})") from error


def _misbound(rewards: Sequence[BoundReward], outputs: Sequence[Output] | None) -> int:
    if outputs is None:
        raise InvalidValue(
            "bound rewards need outputs= to be held against: one Output(id, digest) per sequence"
        )
    if not all(isinstance(each, tuple) and len(each) == 2 for each in outputs):
        raise InvalidValue("outputs hold something else than Output(id, digest); give one per sequence")
    named = [*((each.id, each.digest) for each in rewards), *outputs]
    if not all(isinstance(text, str) for each in named for text in each):
        raise InvalidValue(
            "a reward is bound by id and digest (digest_of), and some of them are no text; give both"
        )
    if len(outputs) != len(rewards):
        raise InvalidValue(f"{len(outputs)} outputs for {len(rewards)} rewards; give one per sequence")
    wrong = sum(
        (each.id, each.digest) != tuple(output) for each, output in zip(rewards, outputs, strict=True)
    )
    return wrong or len(rewards) - len({each.id for each in rewards})


class RewardWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last rewards of batches that were not bad."""

    values: tuple[float, ...] = ()
    misbound: int = 0

    def judge(self, values: Floats, *, whole_test: bool) -> tuple[RewardView, tuple[Reason, ...]]:
        """This batch beside the window; the costly test of whole distributions only where it is asked for."""
        before = np.array(self.values)
        p_value: float | None = None
        reasons: tuple[Reason, ...] = ()
        if min(len(before), len(values)) >= LEAST:
            p_value = mean_shift(_summary(values), _summary(before)).p_value
            limit, what = SHIFT_P, "mean"
            if whole_test and p_value >= SHIFT_P:
                # One number per window: any fixed seed will do, and the same batch gives the same answer.
                p_value = energy_distance(values, before, np.random.default_rng(0), permutations=1999).p_value
                limit, what = TEST_P, "distribution"
            if p_value < limit:
                message = f"the {what} of rewards left the window before: {values.mean():.4g} against {before.mean():.4g}"
                reasons = (Reason(code=Code.REWARD_SHIFT, message=message, value=p_value, limit=limit),)
        view = RewardView(
            count=len(values),
            mean=float(values.mean()) if len(values) else 0.0,
            baseline_count=len(before),
            baseline_mean=float(before.mean()) if len(before) else None,
            baseline_margin=_margin(before, len(values)),
            p_value=p_value,
            misbound=self.misbound,
        )
        return view, reasons

    def after(self, values: tuple[float, ...], misbound: int, most: int, *, bad: bool) -> "RewardWindow":
        """The window moved on by a batch; a bad one is counted, and is no baseline."""
        kept = self.values if bad else (*self.values, *values)[-most:]
        return RewardWindow(values=kept, misbound=self.misbound + misbound)


def _summary(values: Floats) -> Summary:
    return Summary(float(values.mean()), float(values.std(ddof=1)), len(values))


def _margin(before: Floats, count: int) -> float | None:
    """Half the width of the band that `mean_shift` leaves to chance, were the batch as spread as the window."""
    if len(before) < 2 or not count:
        return None
    spread = float(before.std(ddof=1))
    return (
        float(special.stdtrit(len(before) + count - 2, 1 - SHIFT_P / 2))
        * spread
        * math.sqrt(2 / min(count, len(before)))
    )


def against_reference(engine: Any, reference: Any) -> tuple[float, float, float]:
    """p-value of the two-sample test, and both means."""
    first, second = numbers("engine", engine), numbers("reference", reference)
    if min(first.size, second.size) < LEAST:
        raise InvalidValue(
            f"{first.size} and {second.size} rewards; {LEAST} of each are the least that can be compared"
        )
    p_value = energy_distance(first, second, np.random.default_rng(0), permutations=1999).p_value
    return p_value, float(first.mean()), float(second.mean())

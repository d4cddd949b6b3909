"""What a run has shown, out of its records."""

from collections.abc import Sequence

import msgspec

from zerodrift.train.records import StepRecord

ENDS = 10
"""Steps at either end whose mean reward is told: one step's is a few hundred coin tosses."""


class TrainSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All steps in a few numbers."""

    steps: int
    first_reward: float
    last_reward: float
    tokens: int
    rescored: int
    mismatch: float | None
    """Mean of |engine - trainer| over the tokens that were scored again, in nats."""
    mismatch_largest: float | None
    kept_back: int
    dropped: int
    lag: int
    seconds: float
    digest: str


def summary_of(steps: Sequence[StepRecord]) -> TrainSummary:
    """Of at least one step."""
    ends = min(ENDS, -(-len(steps) // 2))
    return TrainSummary(
        steps=len(steps),
        first_reward=sum(each.reward for each in steps[:ends]) / ends,
        last_reward=sum(each.reward for each in steps[-ends:]) / ends,
        tokens=sum(each.tokens for each in steps),
        rescored=sum(each.rescored for each in steps),
        mismatch=_mean(steps),
        mismatch_largest=max(
            (each.mismatch_largest for each in steps if each.mismatch_largest is not None), default=None
        ),
        kept_back=sum(not each.trained for each in steps),
        dropped=sum(len(each.dropped) for each in steps),
        lag=max(each.lag for each in steps),
        seconds=sum(each.seconds for each in steps),
        digest=steps[-1].digest,
    )


def _mean(steps: Sequence[StepRecord]) -> float | None:
    """Over tokens; steps that were recorded before there was a mismatch in them have none."""
    told = [(each.mismatch, each.rescored) for each in steps if each.mismatch is not None]
    tokens = sum(count for _, count in told)
    return sum(mismatch * count for mismatch, count in told) / tokens if tokens else None

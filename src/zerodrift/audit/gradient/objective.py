"""The clipped token objective, as weights on the gradients of single tokens, and the advantages that go into it.

J = Σ min(ρ A, clip(ρ, 1 - ε, 1 + ε) A) over all tokens that are learnt, ρ = policy / behaviour. Its gradient is that of
Σ w log p with w = ρ A, and 0 where the clip holds: so two sets of behaviour logprobs need one forward pass and two weights.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.core.request import SHAPING, SamplingParams
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout
from zerodrift.stats.arrays import Bools, Floats, Ids

SMALLEST_SPREAD = 1e-4
"""Added to the spread of a group's rewards, as TRL does."""
UNSHAPED = SamplingParams()


class ClipRange(NamedTuple):
    """The trainer's ε on either side of 1."""

    low: float
    high: float

    @classmethod
    def of(cls, low: float, high: float | None) -> "ClipRange":
        """One ε for both sides where one is given."""
        require.real(InvalidValue, "epsilon", low, "ratios are clipped at 1 - ε, which is positive", 0, 0.999)
        high = low if high is None else high
        require.real(InvalidValue, "epsilon_high", high, "ratios are clipped at 1 + ε", 0)
        return cls(low, high)


class Learned(NamedTuple):
    """A rollout as the loss sees it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    places: Ids
    """Tokens of the output that are learnt."""
    behavior: Floats
    """What the engine reported of them."""
    advantage: float
    temperature: float


class Weights(NamedTuple):
    """What each token's log p is multiplied by."""

    values: Floats
    clipped: Bools


def weights(policy: Floats, behavior: Floats, advantage: float, clip: ClipRange) -> Weights:
    """Of one rollout. Without an advantage nothing is decided, and nothing learnt."""
    ratio = np.exp(policy - behavior)
    if advantage > 0:
        clipped = ratio > 1 + clip.high
    elif advantage < 0:
        clipped = ratio < 1 - clip.low
    else:
        clipped = np.zeros(ratio.shape, dtype=np.bool_)
    return Weights(np.where(clipped, 0.0, ratio * advantage), clipped)


def learned(batch: ArchivedBatch, temperature: float | None) -> list[list[Learned]]:
    """Rollouts by group. What the archive does not say and cannot be done without is refused."""
    _check_known(batch.rollouts)
    gains = advantages([(str(rollout.group), float(rollout.reward or 0.0)) for rollout in batch.rollouts])
    order = sorted(range(len(batch.rollouts)), key=lambda index: str(batch.rollouts[index].group))
    return [
        [_learned(batch.rollouts[index], gains[index], temperature) for index in indices]
        for _, indices in groupby(order, key=lambda index: batch.rollouts[index].group)
    ]


def advantages(rewards: Sequence[tuple[str, float]]) -> list[float]:
    """GRPO's, from group and reward of each rollout: (reward - mean) / (spread + 1e-4), the spread with n - 1."""
    groups: dict[str, list[float]] = {}
    for group, reward in rewards:
        groups.setdefault(group, []).append(reward)
    if alone := [group for group, values in groups.items() if len(values) < 2]:
        raise InvalidValue(
            f"group {alone[0]!r} has one rollout; an advantage is taken among rollouts of one prompt, so the archive must keep whole groups"
        )
    scales: Mapping[str, tuple[float, float]] = {
        group: (math.fsum(values) / len(values), float(np.std(values, ddof=1)))
        for group, values in groups.items()
    }
    return [(reward - scales[group][0]) / (scales[group][1] + SMALLEST_SPREAD) for group, reward in rewards]


def _check_known(rollouts: Sequence[ArchivedRollout]) -> None:
    for name, why in (
        ("reward", "without rewards there are no advantages: give observe rewards="),
        ("group", "advantages are taken by prompt: give observe groups={'prompt': …}"),
    ):
        if missing := [rollout.id for rollout in rollouts if getattr(rollout, name) is None]:
            raise InvalidValue(
                f"{len(missing)} of {len(rollouts)} rollouts have no {name} ({missing[0]!r}); {why}"
            )
    if wrong := [rollout.id for rollout in rollouts if not math.isfinite(rollout.reward or 0.0)]:
        raise NonFinite(f"the reward of {wrong[0]!r} is not finite, so no advantage can be taken")
    versions = {rollout.version for rollout in rollouts}
    if len(versions) > 1 or any("+" in (version or "") for version in versions):
        shown = ", ".join(sorted(str(version) for version in versions)[:4])
        raise InvalidValue(
            f"the tokens were made by several weights ({shown}); one checkpoint has the true numbers of one of them only"
        )


def _learned(rollout: ArchivedRollout, advantage: float, temperature: float | None) -> Learned:
    for name in SHAPING:
        if (
            name != "temperature"
            and name in rollout.stated
            and getattr(rollout.sampling, name) != getattr(UNSHAPED, name)
        ):
            raise InvalidValue(
                f"rollout {rollout.id!r} was sampled with {name}; the objective is known for temperatures alone"
            )
    told = rollout.sampling.temperature if "temperature" in rollout.stated else temperature
    if told is None or told <= 0:
        raise InvalidValue(
            f"the temperature of rollout {rollout.id!r} is {'unknown' if told is None else told}; say at which the trainer "
            "computes logprobs (--temperature)"
        )
    used = rollout.mask or (True,) * len(rollout.token_ids)
    places: Ids = np.flatnonzero(np.array(used, dtype=np.bool_))
    behavior: Floats = np.array(rollout.behavior_logprobs, dtype=np.float64)[places]
    if not np.isfinite(behavior).all():
        raise NonFinite(
            f"rollout {rollout.id!r} has logprobs that are missing or not finite; no gradient can be taken by them, "
            "and none should: request them from the engine"
        )
    return Learned(rollout.prompt_token_ids, rollout.token_ids, places, behavior, advantage, told)

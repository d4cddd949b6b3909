"""Which rollouts are copies of others? A replay buffer, a retried write or a shared seed records one draw many times.

Copies are as far off as their original, so they change nothing about the numbers. A test of samples takes every draw for
a new one, and two hundred copies of one healthy rollout are impossible under it.
"""

from collections import Counter
from collections.abc import Sequence
from math import lgamma, log

import numpy as np
from numpy.typing import NDArray

from zerodrift.records.recorded import RecordedRollout

BY_CHANCE = log(1e-6)
"""Samples of one prompt that answer yes or no repeat each other, and without the repetitions they would no longer be what
was drawn. Copies are those that chance would not repeat so often: of a million healthy outputs one is taken for copied."""


def copies(rollouts: Sequence[RecordedRollout]) -> NDArray[np.bool_]:
    """True where an earlier rollout has the same prompt, output and logprobs, and chance is no account of it."""
    asked = Counter(rollout.prompt for rollout in rollouts)
    keys = [(rollout.prompt, rollout.output, rollout.logprobs) for rollout in rollouts]
    times, seen = Counter(keys), set()
    found = np.zeros(len(rollouts), dtype=np.bool_)
    for number, (rollout, key) in enumerate(zip(rollouts, keys, strict=True)):
        found[number] = key in seen and _log_chance(rollout, times[key], asked[rollout.prompt]) < BY_CHANCE
        seen.add(key)
    return found


def _log_chance(rollout: RecordedRollout, times: int, asked: int) -> float:
    """Bound of how likely a drawn output comes again `times - 1` times in the other `asked - 1` draws."""
    if rollout.sampling.greedy:
        return 0.0
    others, again = asked - 1, times - 1
    ways = lgamma(others + 1) - lgamma(again + 1) - lgamma(others - again + 1)
    return ways + again * sum(rollout.logprobs)

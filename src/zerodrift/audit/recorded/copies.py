"""Which rollouts are copies of others? A replay buffer, a retried write or a shared seed records one draw many times.

Copies are as far off as their original, so they change nothing about the numbers. A test of samples takes every draw for
a new one, and two hundred copies of one healthy rollout are impossible under it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, exp, lgamma, log

import numpy as np
from numpy.typing import NDArray

from zerodrift.records.recorded import RecordedRollout

Ids = tuple[int, ...]
Key = tuple[Ids, Ids, tuple[float, ...]]
BY_CHANCE = log(1e-6)
"""Samples of one prompt that answer yes or no repeat each other, and without the repetitions they would no longer be what
was drawn. Copies are those that chance would not repeat so often: of a million healthy outputs one is taken for copied."""
SELDOM = 0.1
"""Where chance accounts for less than this share of all pairs that are alike, every repetition is a copy: a file that was
written twice copies short outputs as well, each of which chance might have repeated."""


def copies(rollouts: Sequence[RecordedRollout]) -> NDArray[np.bool_]:
    """True where an earlier rollout has the same prompt, output and logprobs, and chance is no account of it."""
    asked = Counter(rollout.prompt for rollout in rollouts)
    keys = [(rollout.prompt, rollout.output, rollout.logprobs) for rollout in rollouts]
    times, seen = Counter(keys), Counter[Key]()
    written = _times_written(rollouts, times, asked)
    found = np.zeros(len(rollouts), dtype=np.bool_)
    for number, (rollout, key) in enumerate(zip(rollouts, keys, strict=True)):
        by_itself = _log_chance(rollout, times[key], asked[rollout.prompt]) < BY_CHANCE
        # Of a file that was written twice, what stands there four times was drawn twice.
        drawn = 1 if by_itself else ceil(times[key] / written)
        found[number] = seen[key] >= drawn and not rollout.sampling.greedy
        seen[key] += 1
    return found


def _times_written(
    rollouts: Sequence[RecordedRollout], times: Mapping[Key, int], asked: Mapping[Ids, int]
) -> int:
    """How often what stands there more than once was written, as a rule; 1 where chance may have repeated it."""
    if not _copied_throughout(rollouts, times, asked):
        return 1
    written = Counter(
        times[each.prompt, each.output, each.logprobs] for each in rollouts if not each.sampling.greedy
    )
    return max((count for count in written if count > 1), key=lambda count: written[count])


def _copied_throughout(
    rollouts: Sequence[RecordedRollout], times: Mapping[Key, int], asked: Mapping[Ids, int]
) -> bool:
    """Pairs of rollouts that are alike, against how many of them chance gives.

    Two draws of one prompt are alike with the mean probability of a draw, of which every rollout is an example.
    """
    drawn = [rollout for rollout in rollouts if not rollout.sampling.greedy]
    due = sum((asked[each.prompt] - 1) / 2 * exp(min(0.0, sum(each.logprobs))) for each in drawn)
    alike = sum((times[each.prompt, each.output, each.logprobs] - 1) / 2 for each in drawn)
    if not alike or due > SELDOM * alike:
        return False
    # Chernoff's bound of a Poisson count that is so large.
    return due == 0 or alike - due + alike * log(due / alike) < BY_CHANCE


def _log_chance(rollout: RecordedRollout, times: int, asked: int) -> float:
    """Bound of how likely a drawn output comes again `times - 1` times in the other `asked - 1` draws."""
    if rollout.sampling.greedy:
        return 0.0
    others, again = asked - 1, times - 1
    ways = lgamma(others + 1) - lgamma(again + 1) - lgamma(others - again + 1)
    return ways + again * sum(rollout.logprobs)

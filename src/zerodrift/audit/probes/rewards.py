"""Does training on the engine's rollouts see the rewards that the reference's would get?

Engine and reference answer the same prompts equally often, each with seeds of its own. Labels are exchanged within
prompts alone, since a hard prompt has other rewards than an easy one whoever answers it; so both p-values are exact for
every size and every kind of reward. Rewards differ as a consequence: this probe names no cause.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from zerodrift.audit.probes.result import ProbeResult, answered, found, vacuous
from zerodrift.audit.tasks import Rewarded
from zerodrift.records.evidence import RewardsEvidence
from zerodrift.records.verdict import Outcome, Probe
from zerodrift.stats.arrays import Floats, Ids
from zerodrift.stats.intervals import bootstrap_ratio
from zerodrift.stats.twosample import Strata, TwoSampleResult, energy_distance, least_mean_p, mean_difference

NAME = Probe.REWARDS
ALPHA = 1e-4
"""Of both tests together. One healthy audit in 10,000 fails: a nightly one in 27 years. The 1e-6 of the test of samples
is out of reach here: it takes ten million relabellings to see."""
LEAST_P = ALPHA / 4
"""What must have been possible. P-values are counted among relabellings, and one at the limit is seen by luck: of 18
prompts with an answer from each side (1.5e-5) the worst case fails in 99 of 100 runs, of 16 (6.1e-5) in two of three."""
TESTS = 2
"""Means, and whole distributions; the lesser p-value counts, times two (Bonferroni)."""
QUICK, THOROUGH = 9_999, 99_999
"""Relabellings: the least p-value of the second is 1e-5, a fifth of what each test fails at."""
WORTH_A_CLOSER_LOOK = 0.01
"""Below it the quick p-value is replaced by a thorough one; only that can fail, so the level stays what it is."""
LEAST_PROMPTS = 2

Test = Callable[..., TwoSampleResult]


class SideRewards(NamedTuple):
    """What one side was given."""

    rewards: Floats
    prompts: Ids
    """Of each reward, numbered from 0 without gaps, as on the other side."""

    def means(self) -> Floats:
        """Of each prompt."""
        return np.bincount(self.prompts, self.rewards) / self.counts()

    def counts(self) -> Ids:
        """Rewards of each prompt."""
        return np.bincount(self.prompts)


def rewards(task: str, engine: Sequence[Rewarded], reference: Sequence[Rewarded], seed: int) -> ProbeResult:
    """Compare what `task` gave the two sides; prompts that only one of them answered are counted, not compared."""
    both = sorted({each.prompt for each in engine} & {each.prompt for each in reference})
    ours, theirs = _side(engine, both), _side(reference, both)
    evidence = RewardsEvidence(
        task=task,
        prompts=len(both),
        prompts_left_out=len({each.prompt for each in (*engine, *reference)}) - len(both),
        engine_rewards=len(ours.rewards),
        reference_rewards=len(theirs.rewards),
    )
    if len(both) < LEAST_PROMPTS:
        message = f"prompts with rewards of both sides: {len(both)}, where {LEAST_PROMPTS} are needed"
        return vacuous(NAME, message, evidence)
    # For a history, which compares with other runs what cannot be compared within this one.
    mean, std = float(ours.means().mean()), float(ours.means().std(ddof=1))
    evidence = replace(evidence, engine_mean=mean, engine_std=std)
    if np.ptp(np.concatenate((ours.rewards, theirs.rewards))) == 0:
        given = ours.rewards[0]
        known = {0.0: "never solved", 1.0: "always solved"}.get(
            given, f"worth {given:.4g} whatever is answered"
        )
        message = (
            f"every reward is {given:.4g}, on both sides: the task is {known} by this model, which tells nothing; give a "
            "checkpoint that solves it now and then (model.path), or another task (validation.task)"
        )
        return vacuous(NAME, message, evidence)
    return _judge(ours, theirs, evidence, np.random.default_rng(seed))


def _side(rewarded: Sequence[Rewarded], both: Sequence[int]) -> SideRewards:
    number = {prompt: place for place, prompt in enumerate(both)}
    kept = [each for each in rewarded if each.prompt in number]
    return SideRewards(
        np.array([each.reward for each in kept], dtype=np.float64),
        np.array([number[each.prompt] for each in kept], dtype=np.int64),
    )


def _judge(
    ours: SideRewards, theirs: SideRewards, evidence: RewardsEvidence, rng: np.random.Generator
) -> ProbeResult:
    # As the tests weigh them: where both sides answered a prompt equally often, by how often.
    weights = ours.counts() * theirs.counts() / (ours.counts() + theirs.counts())
    gap = bootstrap_ratio(weights * (ours.means() - theirs.means()), weights, np.arange(len(weights)), rng)
    our_mean, their_mean = (float(np.average(side.means(), weights=weights)) for side in (ours, theirs))
    p_mean, p_whole = (_p_value(test, ours, theirs, rng) for test in (mean_difference, energy_distance))
    p_value = min(1.0, TESTS * min(p_mean, p_whole))
    strata = Strata(ours.prompts, theirs.prompts)
    least = min(1.0, TESTS * least_mean_p(ours.rewards, theirs.rewards, strata))
    evidence = replace(
        evidence,
        engine_mean=our_mean,
        reference_mean=their_mean,
        difference=gap.estimate,
        difference_low=gap.low,
        difference_high=gap.high,
        p=p_value,
        p_mean=p_mean,
        p_distribution=p_whole,
        least_p=least,
    )
    message = (
        f"mean reward of the engine {our_mean:.3g}, of the reference {their_mean:.3g}: "
        f"difference {gap.estimate:+.2g} [{gap.low:+.2g}, {gap.high:+.2g}], p = {p_value:.2g}"
    )
    if evidence.prompts_left_out:
        message += f"; {evidence.prompts_left_out} prompts were answered by one side alone and are left out"
    if p_value < ALPHA:
        # A name for the case that nothing else is found; `decide` drops it otherwise.
        cause = found("unexplained", "engine", NAME, message, explained=0.0, interval=(0.0, 0.0))
        return answered(NAME, Outcome.FAIL, message, evidence, causes=(cause,))
    if least > LEAST_P:
        # Nothing was found, and nothing could have been.
        message = (
            f"rewards of one prompt differ too rarely: the least p that they could give is {least:.2g}, and "
            f"{LEAST_P:g} is needed; raise validation.equivalence_trials (--trials), or take prompts that are solved only sometimes"
        )
        return vacuous(NAME, message, evidence)
    return answered(NAME, Outcome.PASS, message, evidence)


def _p_value(test: Test, ours: SideRewards, theirs: SideRewards, rng: np.random.Generator) -> float:
    strata = Strata(ours.prompts, theirs.prompts)
    quick = test(ours.rewards, theirs.rewards, rng, permutations=QUICK, strata=strata).p_value
    if quick > WORTH_A_CLOSER_LOOK:
        return quick
    return test(ours.rewards, theirs.rewards, rng, permutations=THOROUGH, strata=strata).p_value

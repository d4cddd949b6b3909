"""The monitor's figures, each from one command:

    python tests/reliability/monitor_figures.py delays       # planted faults: steps until a batch is kept back, gap named
    python tests/reliability/monitor_figures.py spread [N]   # the same on N other streams: the delays alone
    python tests/reliability/monitor_figures.py incidents    # public ones, by the numbers that were published
    python tests/reliability/monitor_figures.py honest [N]   # N trainings of 1,000 healthy steps
    python tests/reliability/monitor_figures.py moods        # 200 healthy steps whose batches differ by 6 %
    python tests/reliability/monitor_figures.py small [N]    # N trainings of 1,000 healthy steps of four prompts each
    python tests/reliability/monitor_figures.py uneven [N]   # N streams whose sequences differ more: delays of x1.1 on one replica
    python tests/reliability/monitor_figures.py ramps [N]    # N streams each of slow ramps: how far they get until a batch is kept back
    python tests/reliability/monitor_figures.py warm-up      # how well so many tokens know the level that all else is held against

What it costs is in `monitor_cost.py`. `test_monitor.py` holds all of them to their limits.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from monitor_streams import (
    Batch,
    Fault,
    Training,
    batch,
    batches,
    biased,
    noisy,
    one_environment,
    one_replica,
    scaled,
)

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.drift.summary import Workspace
from zerodrift.monitor.baseline import WarmUp
from zerodrift.monitor.decision import Decision, Gap, Measured, State
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.rewards import BoundReward, Output, digest_of
from zerodrift.monitor.state import MonitorState
from zerodrift.monitor.strata import count
from zerodrift.monitor.tracks import QUARANTINE

SINCE, UNTIL = 30, 60
TRAINING = Training(steps=1000, seed=5)
RNG = np.random.default_rng(1)
CONFIG = MonitoringConfig(max_lag=4)


@cache
def stream(seed: int = TRAINING.seed) -> tuple[list[Batch], MonitorState]:
    """The first steps of an honest training, and a monitor that has seen those before SINCE."""
    rng = np.random.default_rng(seed)
    steps = [batch(TRAINING, step, rng) for step in range(UNTIL)]
    monitor = Monitor(CONFIG)
    for each in steps[:SINCE]:
        assert monitor.observe(**each.arguments()).state is State.OK
    return steps, monitor.remembered


def first_bad(fault: Fault, seed: int = TRAINING.seed) -> Decision | None:
    """The first batch that is kept back, of a fault from step SINCE on."""
    steps, state = stream(seed)
    monitor = Monitor(CONFIG)
    monitor._state = state
    for each in steps[SINCE:]:
        decision = monitor.observe(**fault(each).arguments())
        if not decision.train:
            return decision
    return None


def grown(of: Callable[[float], Fault], per_step: float, start: float = 0.0) -> Fault:
    """A fault that grows with every step."""
    return lambda given: of(start + per_step * (given.step - SINCE + 1))(given)


def stale_and_labelled(given: Batch) -> Batch:
    """The engine keeps the weights of step SINCE and says so; samples are re-scored under their own."""
    age = given.step - SINCE
    old = np.minimum(given.old + RNG.normal(0, 0.02 * age**0.5, given.old.size), 0).astype(np.float32)
    more = {"versions": SINCE, "rescored_logprobs": given.old}
    return replace(given, old=old, more=more)


def learning_blows_up(given: Batch) -> Batch:
    # Of its own, whatever was drawn before; and clear of the bar, by which 1.5 nats were a matter of the draw.
    rng = np.random.default_rng(given.step)
    current = np.minimum(given.old + rng.normal(0, 2.0, given.old.size), 0)
    return replace(given, more={"current_logprobs": current.astype(np.float32)})


def not_a_number(given: Batch) -> Batch:
    behavior = given.behavior.copy()
    behavior[17] = np.nan
    return replace(given, behavior=behavior)


def rewards_swapped(given: Batch) -> Batch:
    outputs = [Output(f"{given.step}-{place}", digest_of([place])) for place in range(len(given.rewards))]
    rewards = [BoundReward(*output, value) for output, value in zip(outputs, given.rewards, strict=True)]
    rewards[0], rewards[1] = rewards[1], rewards[0]
    return replace(given, more={"outputs": outputs, "rewards": rewards})


class Planted(NamedTuple):
    """A fault, and what must be said of it."""

    fault: Fault
    gap: Gap | None = Gap.MISMATCH
    where: str | None = ""
    """None: wherever it shows first."""


FAULTS = {
    "0.2 nats everywhere": Planted(noisy(0.2, RNG)),
    "0.2 nats on one replica of eight": Planted(noisy(0.2, RNG, one_replica), where="replica=3"),
    "0.2 nats in one environment of four": Planted(
        noisy(0.2, RNG, one_environment), where="environment=code"
    ),
    "bias of +0.002": Planted(biased(0.002)),
    "bias of -0.002": Planted(biased(-0.002)),
    "scale ×1.1": Planted(scaled(1.1)),
    "bias of 0.002 on one replica of eight": Planted(biased(0.002, one_replica), where="replica=3"),
    "scale ×1.1 on one replica of eight": Planted(scaled(1.1, one_replica), where="replica=3"),
    "scale ×1.3 in one environment of four": Planted(scaled(1.3, one_environment), where="environment=code"),
    "head precision, ×1.44 (Fast-LLM#525)": Planted(scaled(1.44)),
    "stale weights, labelled fresh": Planted(grown(lambda size: noisy(size, RNG), 0.004), where=None),
    "stale weights, labelled stale": Planted(stale_and_labelled, gap=Gap.STALENESS),
    "a ramp of 1 % a step": Planted(grown(scaled, 0.01, 1.0)),
    "an update of 2 nats": Planted(learning_blows_up, gap=Gap.UPDATE),
    "rewards of two outputs swapped": Planted(rewards_swapped, gap=None),
    "one NaN": Planted(not_a_number, gap=None),
}


def delays() -> Iterator[str]:
    yield "| from step k on | steps until it is kept back | gap | reason | where |\n|---|---|---|---|---|"
    for name, planted in FAULTS.items():
        found = first_bad(planted.fault)
        if found is None:
            yield f"| {name} | never | | | |"
            continue
        bad = next(reason for reason in found.reasons if reason.bad)
        yield f"| {name} | {found.step - SINCE} | {found.gap or ''} | `{bad.code}` | {bad.where} |"


def spread(count: int) -> Iterator[str]:
    """On streams that no limit was chosen on."""
    yield "| from step k on | steps until it is kept back |\n|---|---|"
    for name, planted in FAULTS.items():
        found = [first_bad(planted.fault, seed) for seed in range(100, 100 + count)]
        steps = sorted(UNTIL if each is None else each.step - SINCE for each in found)
        wrong = sum(each is not None and each.gap is not planted.gap for each in found)
        yield f"| {name} | {', '.join(map(str, steps))}{f'; {wrong} named another gap' if wrong else ''} |"


# --- public incidents, by the numbers that were published ---------------------------------------------------------


def incident(healthy: float, sizes: list[float]) -> tuple[Decision | None, int]:
    """A stream of this mean |Δ|, then one step for each of `sizes`: the decision that trips, and its place among them."""
    rng = np.random.default_rng(9)
    scale = healthy / 0.0216  # of the simulated training
    monitor = Monitor()
    for step in range(SINCE + len(sizes)):
        given = scaled(scale)(batch(TRAINING, step, rng))
        if step >= SINCE:
            given = scaled(sizes[step - SINCE] / healthy)(given)
        decision = monitor.observe(**given.arguments())
        assert step >= SINCE or decision.state is State.OK
        if not decision.train:
            return decision, step - SINCE
    return None, len(sizes)


INCIDENTS = {
    "trl#5312: 0.015 → 0.201 in one step": (0.015, [0.201] * 3),
    "vime#64: 0.011 → 0.036 over 30 steps": (0.011, np.linspace(0.011, 0.036, 31)[1:].tolist()),
    # No size was published, only that it grew with each of 17 updates and went with a restart.
    "NeMo-RL#4018: grows with every update, here by 2 %": (0.015, [0.015 * 1.02**n for n in range(1, 18)]),
}


def incidents() -> Iterator[str]:
    yield "| incident | trips at its step | mean abs Δ there | reason |\n|---|---|---|---|"
    for name, (healthy, sizes) in INCIDENTS.items():
        found, place = incident(healthy, sizes)
        if found is None or not isinstance(found.mismatch, Measured):
            yield f"| {name} | never | | |"
            continue
        yield f"| {name} | {place + 1} | {found.mismatch.mean_abs:.4f} | `{found.reasons[0].code}` |"


# --- an honest training -------------------------------------------------------------------------------------------


def honest(training: Training, until: int | None = None) -> tuple[Counter[str], float]:
    monitor, codes = Monitor(), Counter[str]()
    highest = 0.0
    for each in islice(batches(training), until):
        decision = monitor.observe(**each.arguments())
        codes.update([str(decision.state), *(str(reason.code) for reason in decision.reasons)])
        highest = max(highest, _highest(monitor.remembered))
    return codes, highest


def trainings(count: int) -> Iterator[str]:
    for seed in range(count):
        codes, highest = honest(replace(TRAINING, seed=seed))
        yield f"seed {seed}: {dict(codes)}, highest chart {highest:.1f} of {QUARANTINE:g}"


def moods() -> Iterator[str]:
    """Whole batches that differ by 6 %, which their sequences do not tell."""
    codes, highest = honest(replace(TRAINING, seed=3, mood=0.06), until=200)
    yield f"200 steps: {dict(codes)}, highest chart {highest:.1f} of {QUARANTINE:g}"


SMALL = replace(TRAINING, prompts=4, samples=4, replicas=4, length=(16, 48))
"""A batch of a laptop: four prompts, four samples of each, 250 tokens at first."""


def small(count: int) -> Iterator[str]:
    """Whose spreads are known from four prompts alone."""
    for seed in range(count):
        codes, highest = honest(replace(SMALL, seed=seed))
        yield f"seed {seed}: {dict(codes)}, highest chart {highest:.1f} of {QUARANTINE:g}"


UNEVEN = (0.2, 0.3, 0.4, 0.5)
LONGER = 90


def uneven(count: int) -> Iterator[str]:
    """Of one replica, on streams that no limit was chosen on; `never`: in the sixty steps that were tried."""
    yield "| spread between sequences | steps until x1.1 on one replica of eight is kept back | highest chart without it |\n|---|---|---|"
    for spread_of in UNEVEN:
        found, highest = [], 0.0
        for seed in range(100, 100 + count):
            training, rng = replace(TRAINING, seed=seed, uneven=spread_of), np.random.default_rng(seed)
            steps = [batch(training, step, rng) for step in range(LONGER)]
            found.append(_steps_to(scaled(1.1, one_replica), steps))
            monitor = Monitor(CONFIG)
            for each in steps:
                monitor.observe(**each.arguments())
                highest = max(highest, _highest(monitor.remembered))
        told = ", ".join(
            "never" if each is None else str(each) for each in sorted(found, key=lambda n: n or 999)
        )
        yield f"| {spread_of:g} | {told} | {highest:.1f} |"


def _steps_to(fault: Fault, steps: list[Batch]) -> int | None:
    monitor = Monitor(CONFIG)
    for each in steps:
        if not monitor.observe(**(each if each.step < SINCE else fault(each)).arguments()).train:
            return each.step - SINCE
    return None


def _highest(state: MonitorState) -> float:
    return max((chart.cusum.score for track in state.tracks.values() for chart in track.charts), default=0.0)


SLOW = (0.001, 0.0015, 0.002, 0.0025, 0.003)
STEADY = replace(TRAINING, sharp=(1.5, 1.5), rounding=(0.012, 0.012))
"""A policy that stands still, so that the ramp is all that grows, and far enough below the gates."""
FAR = 1.6
"""Times the level at the start: beyond 1.5 the monitor asks for a canary."""


def ramps(count: int) -> Iterator[str]:
    """With replicas told apart, and without."""
    yield "| a version | growth when a batch is kept back, eight replicas | without replica labels |\n|---|---|---|"
    for rate in SLOW:
        told = [
            ", ".join(_until_kept_back(rate, seed, replicas=replicas) for seed in range(100, 100 + count))
            for replicas in (True, False)
        ]
        yield f"| {100 * rate:g} % | {told[0]} | {told[1]} |"


def _until_kept_back(rate: float, seed: int, *, replicas: bool) -> str:
    rng, monitor, times, step = np.random.default_rng(seed), Monitor(CONFIG), 1.0, 0
    while times < FAR:
        given = scaled(times)(batch(STEADY, step, rng)).arguments()
        if not replicas:
            del given["groups"]["replica"]
        found = monitor.observe(**given)
        if not found.train:
            return f"{times:.2f}"
        step += 1
        times = (1 + rate) ** max(0, step - SINCE)
    return "not"


TINY = replace(TRAINING, prompts=4, samples=1, replicas=1, length=(5, 5))
"""Twenty tokens a step."""


def warm_up() -> Iterator[str]:
    """Twelve baselines of so many tokens each, in batches of twenty."""
    yield "| tokens | mean abs Δ of the baselines | their spread |\n|---|---|---|"
    for tokens in (200, 500, 1000, 2000, 5000):
        levels = np.array([_level(seed, tokens) for seed in range(12)])
        yield f"| {tokens:,} | {levels.min():.4f} to {levels.max():.4f} | {levels.std() / levels.mean():.0%} |"


def _level(seed: int, tokens: int) -> float:
    rng, found = np.random.default_rng(seed), WarmUp()
    while sum(found.tokens) < tokens:
        given = batch(TINY, 0, rng)
        block = Workspace(given.old.size).block(given.old, given.behavior)
        found = found.then(WarmUp.of(count(block, given.old, given.lengths, None)))
    return found.baseline("first batches").mean_abs


def main(words: list[str]) -> None:
    lines = {
        "delays": delays,
        "spread": lambda: spread(int(words[1]) if len(words) > 1 else 4),
        "incidents": incidents,
        "honest": lambda: trainings(int(words[1]) if len(words) > 1 else 1),
        "moods": moods,
        "uneven": lambda: uneven(int(words[1]) if len(words) > 1 else 4),
        "ramps": lambda: ramps(int(words[1]) if len(words) > 1 else 1),
        "warm-up": warm_up,
        "small": lambda: small(int(words[1]) if len(words) > 1 else 1),
    }[words[0]]()
    for line in lines:
        print(line, flush=True)  # noqa: T201 - a program


if __name__ == "__main__":
    main(sys.argv[1:])

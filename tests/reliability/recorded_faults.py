"""Faults planted into what a real training recorded: how soon the monitor keeps a batch back, and which gap it names.

    python tests/reliability/recorded_faults.py runs/honest/vllm-bf16 [--until 200]

Takes the records of `honest_training.py`, real tokens of a real engine and a real trainer at equal weights, up to a step, and draws
whole prompts out of them with their samples until a batch has 20,000 tokens. From step 30 on the faults of `monitor_figures.py` are
planted. Prompts are drawn again and again, so this is about the sizes and spreads of real numbers, not about a policy that moves.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from honest_training import TRAININGS, monitor_of, recorded
from monitor_figures import CONFIG, FAULTS, SINCE, UNTIL
from monitor_streams import ENVIRONMENTS, REPLICAS, Batch, Fault

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.monitor.decision import Decision, State
from zerodrift.monitor.monitor import Monitor

TOKENS = 20_000


class Group(NamedTuple):
    """One prompt's samples."""

    behavior: np.ndarray
    old: np.ndarray
    lengths: np.ndarray


def groups_of(directory: Path, until: int) -> list[Group]:
    """Every prompt of the steps before `until`."""
    samples = TRAININGS[directory.name].samples
    found = []
    for step, flat in recorded(directory):
        if step >= until:
            break
        trainer = flat.get("rescored", flat["old"])
        ends = np.cumsum(flat["lengths"])
        for first in range(0, len(ends), samples):
            lengths = flat["lengths"][first : first + samples]
            part = slice(ends[first] - lengths[0], ends[first + samples - 1])
            found.append(Group(flat["behavior"][part], np.minimum(trainer[part], 0), lengths))
    return found


def batch(pool: list[Group], step: int, rng: np.random.Generator) -> Batch:
    chosen: list[Group] = []
    while sum(int(group.lengths.sum()) for group in chosen) < TOKENS:
        chosen += [pool[place] for place in rng.integers(len(pool), size=16)]
    lengths = np.concatenate([group.lengths for group in chosen])
    prompt = np.repeat(np.arange(len(chosen)), [len(group.lengths) for group in chosen])
    return Batch(
        step=step,
        behavior=np.concatenate([group.behavior for group in chosen]),
        old=np.concatenate([group.old for group in chosen]),
        lengths=lengths,
        # By chance: places in a row would tie replicas to environments.
        replica=rng.integers(REPLICAS, size=len(lengths)),
        environment=prompt % len(ENVIRONMENTS),
        prompt=prompt,
        rewards=(rng.random(len(lengths)) < 0.4).astype(float),
    )


class Stream:
    """Batches, and a monitor that has seen the healthy ones before SINCE."""

    def __init__(self, directory: Path, until: int) -> None:
        pool, rng = groups_of(directory, until), np.random.default_rng(0)
        self.steps = [batch(pool, step, rng) for step in range(UNTIL)]
        level = json.loads((directory / "level.json").read_text())
        self._asked, gate = (
            TRAININGS[directory.name],
            monitor_of(TRAININGS[directory.name], level).config.kl_threshold,
        )
        self._config = MonitoringConfig(max_lag=CONFIG.max_lag, kl_threshold=gate)
        monitor = self._monitor()
        for each in self.steps[:SINCE]:
            decision = monitor.observe(**each.arguments())
            assert decision.state is State.OK, decision.reasons
        self._state = monitor.remembered

    def _monitor(self) -> Monitor:
        return Monitor(self._config, precision=self._asked.precision)

    def first_bad(self, fault: Fault) -> Decision | None:
        monitor = self._monitor()
        monitor._state = self._state
        for each in self.steps[SINCE:]:
            decision = monitor.observe(**fault(each).arguments())
            if not decision.train:
                return decision
        return None


def table(stream: Stream) -> Iterator[str]:
    delta = np.concatenate([each.old.astype(np.float64) - each.behavior for each in stream.steps[SINCE:]])
    yield f"healthy mean abs Δ {np.abs(delta).mean():.3g}, bias {delta.mean():+.2g}, {len(stream.steps[0].lengths)} outputs a step\n"
    yield "| from step k on | steps until it is kept back | gap | reason | where |\n|---|---|---|---|---|"
    for name, fault in {
        "healthy": lambda given: given,
        **{name: each.fault for name, each in FAULTS.items()},
    }.items():
        found = stream.first_bad(fault)
        if found is None:
            yield f"| {name} | never | | | |"
            continue
        bad = next(reason for reason in found.reasons if reason.bad)
        yield f"| {name} | {found.step - SINCE} | {found.gap or ''} | `{bad.code}` | {bad.where} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--until", type=int, default=200)
    given = parser.parse_args()
    for line in table(Stream(given.directory, given.until)):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""A simulated training under the real monitor, for `zerodrift view`: nothing that the page shows is drawn by hand.

    python tests/reliability/live_training.py runs/docs/live [--steps 400] [--pause 0.2]

Policy, engine and trainer are those of `monitor_streams`; tokens are up to two versions old. For a while nothing is re-scored,
so that the mismatch of older tokens cannot be seen; then an engine reports 0.2 nats too little for two steps, and later
one replica of eight does, until the breaker halts and somebody lets batches through again.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from monitor_streams import Batch, Training, batches, biased, one_replica

from zerodrift.monitor.directory import STEPS
from zerodrift.monitor.monitor import Monitor

TOKENS = 4000
VOCABULARY = 50_000


def arguments(batch: Batch, rng: np.random.Generator, *, rescored: bool) -> dict[str, Any]:
    """Of `observe`, with everything that a page can show."""
    lag = rng.integers(0 if rescored else 1, 3, len(batch.lengths))
    of_tokens = batch.of_tokens(lag)
    older = np.minimum(batch.old + of_tokens * rng.normal(0, 0.02, batch.old.size), 0)
    ids = rng.integers(0, VOCABULARY, batch.old.size)
    ends = np.cumsum(batch.lengths)[:-1]
    return {
        **batch.arguments(),
        "old_logprobs": older.astype(np.float32),
        "current_logprobs": np.minimum(older + rng.normal(0, 0.03, older.size), 0).astype(np.float32),
        "rescored_logprobs": batch.old if rescored else None,
        "versions": np.maximum(0, batch.step - of_tokens),
        "prompt_ids": [rng.integers(0, VOCABULARY, 12).tolist() for _ in batch.lengths],
        "completion_ids": [part.tolist() for part in np.split(ids, ends)],
        "reference_kl": 0.002 * batch.step**0.8,
    }


def train(directory: Path, steps: int, *, pause: float = 0.0, tokens: int = TOKENS, seed: int = 0) -> None:
    """Every step, as a trainer would."""
    rng = np.random.default_rng(seed)
    monitor = Monitor(directory=directory, healthy_every=50)
    replica = biased(0.2, one_replica)
    for batch in batches(Training(steps=steps, tokens=tokens, length=(30, 60), seed=seed)):
        done = batch.step / steps
        blind = 0.35 < done < 0.43
        bad = batch
        if batch.step in (int(0.55 * steps), int(0.55 * steps) + 1):
            bad = biased(0.2)(batch)
        elif 0.8 <= done < 0.8 + 3.5 / steps:
            bad = replica(batch)
        decision = monitor.observe(**arguments(replace(bad), rng, rescored=not blind))
        if decision.state == "HALT":
            monitor.half_open()
        time.sleep(pause)
    monitor.close()


def prolong(directory: Path, steps: int) -> None:
    """As many steps: the lines that are there, over and over under new numbers. For the load on a page, not for its looks."""
    path = directory / STEPS
    lines = path.read_bytes().splitlines(keepends=True)
    numbered = [line.split(b'"step":', 1) for line in lines]
    rests = [(head, rest.split(b",", 1)[1]) for head, rest in numbered]
    with path.open("ab") as file:
        for step in range(len(lines), steps):
            head, rest = rests[step % len(rests)]
            file.write(b'%s"step":%d,%s' % (head, step, rest))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--prolong", type=int, default=0)
    given = parser.parse_args()
    train(given.directory, given.steps, pause=given.pause)
    if given.prolong:
        prolong(given.directory, given.prolong)

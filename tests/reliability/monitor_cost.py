"""What the monitor costs, each figure from one command:

    python tests/reliability/monitor_cost.py passes     # `observe` of a million tokens, in passes of numpy over them
    python tests/reliability/monitor_cost.py parts      # where that time goes
    python tests/reliability/monitor_cost.py memory     # over 100,000 steps
    python tests/reliability/monitor_cost.py step       # beside a training step of the same tokens

`test_monitor.py` holds them to their limits.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from zerodrift.drift.summary import BLOCK, BlockSums, Workspace
from zerodrift.monitor.decision import State
from zerodrift.monitor.gaps import Difference
from zerodrift.monitor.measure import measure, parts
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.strata import count

TOKENS = 1_000_000
EPSILON = 0.2


def cheapest(work: Callable[[], Any], times: int = 15) -> float:
    """On the processor's clock, the best of some: others use this machine too."""
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def million() -> dict[str, Any]:
    """Float32, a thousand sequences of a thousand tokens, |Δ| as of a healthy engine in bf16."""
    rng = np.random.default_rng(0)
    behavior = -rng.exponential(1.0, TOKENS).astype(np.float32) - np.float32(0.5)
    old = behavior + rng.normal(0, 0.015, behavior.size).astype(np.float32)
    return {
        "behavior_logprobs": behavior, "old_logprobs": old, "lengths": np.full(1000, 1000), "versions": 0,
        "trainer_version": 0,
    }  # fmt: skip


# --- in passes ----------------------------------------------------------------------------------------------------


def mean_ratio(old: np.ndarray, behavior: np.ndarray) -> float:
    """One pass: the mean importance ratio in float32, the least that any framework computes of these tokens."""
    return float(np.exp(old - behavior).mean())


def mean_k3(old: np.ndarray, behavior: np.ndarray) -> float:
    """The same in float64, of k3, which float32 does not resolve."""
    delta = old.astype(np.float64) - behavior
    return float((np.expm1(delta) - delta).mean())


PASSES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "sum of one array, float32": lambda old, _: float(old.sum()),
    "mean |Δ|, float32": lambda old, behavior: float(np.abs(old - behavior).mean()),
    "mean ratio, float32": mean_ratio,
    "mean k3, float64": mean_k3,
}


def warm(given: dict[str, Any]) -> Monitor:
    """One that has its baseline, so that every cell is judged."""
    monitor = Monitor()
    for _ in range(12):
        assert monitor.observe(**given).state is State.OK
    return monitor


def seconds(name: str) -> tuple[float, float]:
    """Of one pass of this name over a million float32 tokens, and of `observe`."""
    given = million()
    monitor = warm(given)
    one = cheapest(lambda: PASSES[name](given["old_logprobs"], given["behavior_logprobs"]))
    return one, cheapest(lambda: monitor.observe(**given))


def table(turns: int = 31) -> Iterator[str]:
    """Medians, each turn one `observe` and one of every pass, so that what slows the machine slows all of them: the best of some
    is kind to a pass, which is over before anything interrupts it."""
    given = million()
    monitor = warm(given)
    arrays = given["old_logprobs"], given["behavior_logprobs"]
    work = {"observe": lambda: monitor.observe(**given)}
    work |= {name: partial(one, *arrays) for name, one in PASSES.items()}
    found = {name: [] for name in work}
    for _ in range(turns):
        for name, each in work.items():
            found[name].append(cheapest(each, 1))
    middle = {name: median(values) for name, values in found.items()}
    yield f"observe of {TOKENS:,} tokens: {1e3 * middle['observe']:.1f} ms\n\n| one pass | ms | passes |\n|---|---|---|"
    for name in PASSES:
        yield f"| {name.replace('|', '&#124;')} | {1e3 * middle[name]:.2f} | {middle['observe'] / middle[name]:.1f} |"


def where() -> Iterator[str]:
    given = million()
    old, behavior, counts = given["old_logprobs"], given["behavior_logprobs"], given["lengths"]
    monitor, difference = warm(given), Difference(old, behavior)
    memory = Workspace(BLOCK + 1000)
    split = list(parts(difference, counts))
    block = memory.block(split[0].later, split[0].earlier)
    for name, work in {
        "observe": lambda: monitor.observe(**given),
        "measure": lambda: measure(difference, counts, EPSILON, by_stratum=True),
        "exponentials": lambda: [memory.block(part.later, part.earlier) for part in split],
        "sums and bins": lambda: [BlockSums.of(block) for _ in split],
        "strata": lambda: [count(block, split[0].later, split[0].counts, None) for _ in split],
    }.items():
        yield f"{name:14} {1e3 * cheapest(work):6.2f} ms"


# --- memory -------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """What a process holds after some steps."""

    steps: int
    state: int
    """Bytes of all that the monitor remembers."""
    blocks: int
    """Pieces of memory that Python has given out."""
    resident: int
    """Kilobytes that the process has."""


def held(steps: int, every: int) -> Iterator[Held]:
    """In the course of many small steps, with two kinds of groups and rewards."""
    rng = np.random.default_rng(0)
    behavior = -rng.exponential(1.0, (8, 32)) - 0.5
    groups = {"replica": list(range(8)), "environment": ["math", "code"] * 4}
    monitor = Monitor()
    for step in range(steps):
        old = behavior + rng.normal(0, 0.01, behavior.shape)
        monitor.observe(
            behavior_logprobs=behavior, old_logprobs=old, versions=step, trainer_version=step, groups=groups,
            rewards=rng.random(8),
        )  # fmt: skip
        if step % every == every - 1:
            gc.collect()
            state = len(msgspec.json.encode(monitor.remembered))
            yield Held(step + 1, state, sys.getallocatedblocks(), resident_kb())


def resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def memory() -> Iterator[str]:
    yield "| steps | state, bytes | pieces of memory | resident, kB |\n|---|---|---|---|"
    for each in held(100_000, 10_000):
        yield f"| {each.steps:,} | {each.state:,} | {each.blocks:,} | {each.resident:,} |"


# --- beside a training step ---------------------------------------------------------------------------------------


def step() -> Iterator[str]:
    """Forward, backward and AdamW of a testbed model over a batch, and `observe` of its tokens."""
    import torch

    from zerodrift.models.loading import load

    torch.set_num_threads(1)
    model = load("testbed:qwen3")
    optimizer = torch.optim.AdamW(model.parameters())
    rows, length = 16, 256
    ids = torch.randint(5, 200, (rows, length), generator=torch.Generator().manual_seed(0))

    def train() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    rng = np.random.default_rng(0)
    behavior = (-rng.exponential(1.0, (rows, length)) - 0.5).astype(np.float32)
    old = behavior + rng.normal(0, 0.01, behavior.shape).astype(np.float32)
    given = {"behavior_logprobs": behavior, "old_logprobs": old, "versions": 0, "trainer_version": 0}
    monitor = warm(given)
    learned, observed = cheapest(train, 5), cheapest(lambda: monitor.observe(**given))
    size = sum(parameter.numel() for parameter in model.parameters())
    yield f"{rows * length:,} tokens, {size:,} parameters, one core: training step {1e3 * learned:.0f} ms, observe {1e3 * observed:.2f} ms, {100 * observed / learned:.2f} %"


def main(word: str) -> None:
    for line in {"passes": table, "parts": where, "memory": memory, "step": step}[word]():
        print(line, flush=True)  # noqa: T201 - a program


if __name__ == "__main__":
    main(sys.argv[1])

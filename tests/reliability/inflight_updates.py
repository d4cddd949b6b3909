"""Weights that change while requests run, again and again: `inflight_updates.py [--updates 1000] [--kv keep]`.

Clients keep an engine busy while a trainer publishes one version after the other. Every output is then replayed from what it
says of itself, token by token and bit by bit. The stall is the time from the last token before a swap to the first one after;
it is held against two steps and the copy, both taken in the same run: a step as the gap between tokens without a swap, the
copy as a swap of the same weights in the engine when it is idle.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from updating import FIRST, model_of

from zerodrift.core.request import SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.output import Output
from zerodrift.engine.replay import check_replay
from zerodrift.engine.weights import StagedWeights

CLIENTS = 3
TOKENS = 24
COPIES = 10


class Told(NamedTuple):
    """What a run was."""

    outputs: list[Output]
    over_several: int
    """Outputs whose tokens are of more than one version."""
    stalls_ms: list[float]
    """Of each swap."""
    step_ms: float
    copy_ms: float
    """Medians: of a step without a swap, and of a swap without a step."""

    @property
    def stall(self) -> str:
        """The middle, the worst in a hundred, and the middle in units of what a swap may take."""
        middle, high = statistics.median(self.stalls_ms), statistics.quantiles(self.stalls_ms, n=100)[-1]
        allowed = 2 * self.step_ms + self.copy_ms
        return (
            f"stall {middle:.1f} ms (p99 {high:.1f}), {middle / allowed:.2f} of two steps of {self.step_ms:.1f} ms and a copy "
            f"of {self.copy_ms:.1f} ms"
        )

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop, self._over = loop, threading.Event()
        self.outputs: list[Output] = []
        self.times: list[float] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, client: int) -> None:
        number = 0
        while not self._over.is_set():
            params = SamplingParams(seed=1000 * client + number, max_tokens=TOKENS, ignore_eos=True)
            prompt = [2 + (client + number + place) % 50 for place in range(3 + number % 9)]
            self.outputs += self._loop.submit(prompt, params, on_update=self._tick).result()
            number += 1

    def _tick(self, _: object) -> None:
        self.times.append(time.perf_counter())

    def wait(self, tokens: int) -> None:
        """Until so many more have come: an update falls among requests that run."""
        wanted = len(self.times) + tokens
        while len(self.times) < wanted:
            time.sleep(0.0005)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def run(updates: int, kv: str) -> tuple[Told, Engine]:
    engine = Engine(model_of(FIRST), num_blocks=64, block_size=4, version=FIRST, logprob_check_interval=0)
    stalls: list[float] = []
    with EngineLoop(engine) as loop:
        load = Load(loop)
        for number in range(1, updates + 1):
            load.wait(4)
            staged = engine.stage_weights(model_of(f"v{number % 40}").state_dict(), f"v{number}")
            began: list[tuple[int, float]] = []
            loop.swap_weights(
                staged, kv=kv, before=lambda began=began: began.append((len(load.times), load.times[-1]))
            )
            load.wait(1)
            at, before = began[0]
            stalls.append(load.times[at] - before)
        load.end()
    copies = []
    for number in range(updates + 1, updates + 1 + COPIES):
        staged = engine.stage_weights(model_of(f"v{number % 40}").state_dict(), f"v{number}")
        begin = time.perf_counter()
        engine.swap_weights(staged, kv=kv)
        copies.append(time.perf_counter() - begin)
    gaps = [later - earlier for earlier, later in zip(load.times, load.times[1:], strict=False)]
    steps = [gap for gap in gaps if gap > 1e-5]
    several = sum(len({span.version for span in output.versions}) > 1 for output in load.outputs)
    step_ms, copy_ms = (1e3 * statistics.median(each) for each in (steps, copies))
    return Told(load.outputs, several, [1e3 * stall for stall in stalls], step_ms, copy_ms), engine


def replayed(told: Told, engine: Engine) -> int:
    """How many outputs were; the first that has other bits raises."""

    @cache
    def weights(label: str) -> StagedWeights:
        number = int(label[1:])
        return engine.stage_weights(model_of(f"v{number % 40}").state_dict(), label)

    weights_of: Callable[[WeightVersion], Any] = lambda version: weights(version.label)  # noqa: E731
    for output in told.outputs:
        check_replay(engine, output, weights_of)
    return len(told.outputs)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--kv", choices=("keep", "recompute"), nargs="+", default=("keep", "recompute"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kv in options.kv:
        told, engine = run(options.updates, kv)
        count = replayed(told, engine)
        sys.stdout.write(
            f"{kv}: {options.updates} updates, {count} outputs with {told.tokens} tokens replayed, every bit; "
            f"{told.over_several} over several versions; {told.stall}\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

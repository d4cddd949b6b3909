"""Sixty-four threads on one engine loop: they submit, stream, abort and read metrics while weights change.

Every token must arrive once, and its bits must be those of the same request served alone under the weights that it
reports: for each span of an output, an engine with those weights is given the tokens before it and draws the rest.
"""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest

from zerodrift.core.completion import FinishReason
from zerodrift.core.errors import QueueFull
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.output import Output, SampleUpdate

THREADS = 64
WEIGHTS = {"0": 1.0, "1": 1.1, "2": 1.25}
# They go on until the weights have changed so often: a fast machine had answered all of them after three.
SWAPS = 6


class Asked(NamedTuple):
    prompt: tuple[int, ...]
    sampling: SamplingParams


class Got(NamedTuple):
    asked: Asked
    updates: list[SampleUpdate]
    outputs: list[Output]


def requests() -> list[Asked]:
    """Forty, half of which begin alike. Nothing is truncated: a token of other weights may have to be forced."""
    draw, found = random.Random(0), []
    for number in range(40):
        tail = tuple(draw.randrange(60) for _ in range(draw.randint(1, 10)))
        sampling = SamplingParams(
            seed=number,
            max_tokens=draw.randint(1, 8),
            n=draw.choice([1, 1, 1, 2]),
            temperature=draw.choice([0.7, 1.0, 1.0]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            ignore_eos=True,
        )
        found.append(Asked((*range(1, 10), *tail) if number % 2 else tail, sampling))
    return found


class Crowd:
    """All threads, and what each of them got."""

    def __init__(self, loop: EngineLoop, num_requests: int) -> None:
        self.loop, self.asked, self.failures = loop, requests(), list[BaseException]()
        self.got: list[list[Got]] = [[] for _ in range(THREADS)]
        self.share = -(-num_requests // THREADS)
        self.swaps = 0

    def run(self) -> list[Got]:
        """Until every thread has had its share and the weights have changed enough."""
        working = threading.Event()
        states = {name: weights(self.loop.engine, scale) for name, scale in WEIGHTS.items()}
        swapper = threading.Thread(target=self.guarded, args=(self.swap, states, working))
        threads = [
            threading.Thread(target=self.guarded, args=(self.user, number)) for number in range(THREADS)
        ]
        for thread in (swapper, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        working.set()
        swapper.join()
        assert self.failures == []
        return [got for each in self.got for got in each]

    def guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            self.failures.append(error)

    def user(self, number: int) -> None:
        draw, steps = random.Random(number), 0
        while len(self.got[number]) < self.share or self.swaps < SWAPS:
            asked = draw.choice(self.asked)
            how = draw.choice([self.streamed, self.streamed, self.waited, self.called_back, self.aborted])
            while True:
                try:
                    updates, outputs = how(asked, draw)
                    break
                except QueueFull:
                    time.sleep(0.005)
            self.got[number].append(Got(asked, updates, outputs))
            now = self.loop.metrics()
            assert now.steps >= steps
            assert 0 <= now.blocks_held + now.blocks_idle <= now.blocks_total
            assert self.loop.fingerprint().semantic["weights"]
            steps = now.steps

    def streamed(self, asked: Asked, draw: random.Random) -> tuple[list[SampleUpdate], list[Output]]:
        handle = self.loop.submit(asked.prompt, asked.sampling)
        return list(handle), handle.result()

    def waited(self, asked: Asked, draw: random.Random) -> tuple[list[SampleUpdate], list[Output]]:
        handle = self.loop.submit(asked.prompt, asked.sampling)
        outputs = handle.result(timeout=300)
        return list(handle), outputs

    def called_back(self, asked: Asked, draw: random.Random) -> tuple[list[SampleUpdate], list[Output]]:
        updates: list[Any] = []
        handle = self.loop.submit(asked.prompt, asked.sampling, on_update=updates.append)
        return updates, handle.result(timeout=300)

    def aborted(self, asked: Asked, draw: random.Random) -> tuple[list[SampleUpdate], list[Output]]:
        handle = self.loop.submit(asked.prompt, asked.sampling)
        begun = [update for _, update in zip(range(draw.randint(0, 3)), handle, strict=False)]
        handle.abort()
        return [*begun, *handle], handle.result()

    def swap(self, states: dict[str, Any], working: threading.Event) -> None:
        """New tensors every time, and now and then ones that were staged before."""
        draw, kept = random.Random(0), self.loop.engine.stage_weights(states["0"], "0")
        while not working.wait(draw.uniform(0, 0.2)):
            name = draw.choice(list(states))
            self.loop.swap_weights(*((kept,) if name == "0" else (states[name], name)))
            self.swaps += 1


def weights(engine: Engine, scale: float) -> dict[str, Any]:
    return {name: tensor * scale for name, tensor in engine.model.state_dict().items()}


def whole(got: Got) -> None:
    """Nothing is lost, nothing comes twice: the updates of each sample are its output, which comes with the last."""
    assert [output.sample_index for output in got.outputs] == list(range(got.asked.sampling.n))
    for output in got.outputs:
        assert output.problem is None
        mine = [update for update in got.updates if update.sample_index == output.sample_index]
        assert tuple(token for update in mine for token in update.token_ids) == output.token_ids
        assert tuple(value for update in mine for value in update.logprobs) == output.logprobs
        assert [update.output for update in mine] == [None] * (len(mine) - 1) + [output]
    assert len(got.updates) == sum(max(len(o.token_ids), 1) + late(got, o) for o in got.outputs)


def late(got: Got, output: Output) -> bool:
    """An abort is an update of its own, after the last token."""
    return output.finish_reason is FinishReason.ABORT and bool(output.token_ids)


@pytest.mark.parametrize("num_requests", [150, pytest.param(10_000, marks=pytest.mark.long)])
def test_every_token_arrives_once_with_the_bits_of_its_weights(
    engine_of: Callable[..., Engine], num_requests: int
) -> None:
    engine = engine_of(num_blocks=48, max_num_seqs=16, max_num_batched_tokens=96, logprob_check_interval=16)
    alone = {"initial": engine_of()}
    for name, scale in WEIGHTS.items():
        alone[name] = engine_of()
        alone[name].swap_weights(weights(alone[name], scale), name)

    @cache
    def served_alone(label: str, asked: Asked, given: tuple[int, ...]) -> list[Output]:
        return alone[label].generate([list(asked.prompt)], asked.sampling, forced=[given])

    with EngineLoop(engine) as loop:
        crowd = Crowd(loop, num_requests)
        every = crowd.run()
    assert len(every) >= num_requests
    straddling = 0
    for got in every:
        whole(got)
        for output in got.outputs:
            straddling += len(output.versions) > 1
            for span in output.versions:
                given = output.token_ids[: span.start]
                expected = served_alone(span.version.label, got.asked, given)[output.sample_index]
                inside = slice(span.start, span.end)
                assert output.token_ids[inside] == expected.token_ids[inside]
                assert output.logprobs[inside] == expected.logprobs[inside]
    metrics, reasons = engine.metrics(), Counter(o.finish_reason for got in every for o in got.outputs)
    sys.stdout.write(
        f"{len(every)} requests, {metrics.sampled_tokens} tokens, {crowd.swaps} swaps, {straddling} outputs across one, "
        f"{metrics.preemptions} preemptions, {metrics.checked_samples} checked while running, {dict(reasons)}\n"
    )
    assert crowd.swaps >= SWAPS
    assert straddling > 0
    assert reasons[FinishReason.ABORT] > 0
    assert metrics.sampled_tokens == sum(len(o.token_ids) for got in every for o in got.outputs)
    assert (metrics.running, metrics.waiting, metrics.blocks_held) == (0, 0, 0)
    assert not loop.alive

"""64 streams against the engine alone, side by side: `serve_load.py [--pairs 5] [--streams 64] [--tokens 64] [--model MODEL]`.

In turns, on the same requests: the engine in this process, and a server of its own process whose answers are streamed to this
one. All tokens must be the same, bit for bit. Throughput is told by the clock and by the processor time of whoever has the engine:
on a machine that others use, too, the second is the one to believe. Meanwhile /health is asked, and at the end more than the queue
holds is.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hour_traffic import MODEL, Client, logprobs_of
from serving_process import Server, served

from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine

OVER_S = 1.0
"""In which the streams of one round begin, each at a time of its own, whatever became of the others."""
HEALTH_S = 0.02


class Took(NamedTuple):
    """For the tokens of one round."""

    wall_s: float
    processor_s: float


class Streaming(threading.Thread):
    """One stream."""

    def __init__(self, client: Client, prompt: list[int], seed: int, tokens: int, at_s: float) -> None:
        super().__init__()
        self._client, self._at_s = client, at_s
        self._body = {"prompt": prompt, "seed": seed, "max_tokens": tokens, "logprobs": 0, "stream": True,
                      "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    def run(self) -> None:
        time.sleep(self._at_s)
        connection, answer = self._client.open("/v1/completions", self._body)
        for line in answer:
            if line.startswith(b"data: {"):
                [choice] = json.loads(line[6:])["choices"]
                self.tokens += choice["token_ids"]
                self.logprobs += logprobs_of(choice)
        answer.close()
        connection.close()


class Health(threading.Thread):
    """How long the server takes to say that it is ready."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self._client, self.over, self.ms = client, threading.Event(), list[float]()

    def run(self) -> None:
        while not self.over.wait(HEALTH_S):
            begin = time.perf_counter()
            assert self._client.ask("/health", method="GET")[0] == 200
            self.ms.append(1e3 * (time.perf_counter() - begin))


def processor_s(pid: int) -> float:
    """Of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def alone(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[Took, list[Any]]:
    begin, used = time.perf_counter(), time.process_time()
    outputs = engine.generate(prompts, params)
    took = Took(time.perf_counter() - begin, time.process_time() - used)
    return took, [(list(each.token_ids), list(each.logprobs)) for each in outputs]


def over_http(
    server: Server, prompts: list[list[int]], params: list[SamplingParams], over_s: float
) -> tuple[Took, list[Any]]:
    client, draw = Client(server.url), random.Random(0)
    streams = [
        Streaming(client, prompt, each.seed or 0, each.max_tokens, draw.random() * over_s)
        for prompt, each in zip(prompts, params, strict=True)
    ]
    begin, used = time.perf_counter(), processor_s(server.process.pid)
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join()
    took = Took(time.perf_counter() - begin, processor_s(server.process.pid) - used)
    return took, [(stream.tokens, stream.logprobs) for stream in streams]


def beyond(client: Client, most: int) -> str:
    """What is said to more than may wait, and how long that takes."""
    begin = time.perf_counter()
    status, _, headers = client.ask("/v1/completions", {"prompt": [[5]] * (most + 1), "max_tokens": 1})
    took = 1e3 * (time.perf_counter() - begin)
    return f"{status}, Retry-After {headers.get('retry-after')}, in {took:.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine(options.model, max_num_seqs=options.streams)
    ratios, lost, extra_us = [], 0, []
    limits = ("--max-num-seqs", str(options.streams), "--max-waiting", str(options.streams))
    with tempfile.TemporaryDirectory() as root, served(Path(root), *limits, model=options.model) as server:
        client = Client(server.url)
        health = Health(client)
        for pair in range(-1, options.pairs):  # the first warms up
            draw = random.Random(pair)
            prompts = [[draw.randrange(4, 500) for _ in range(16)] for _ in range(options.streams)]
            params = [
                SamplingParams(seed=n, max_tokens=options.tokens, ignore_eos=True)
                for n in range(options.streams)
            ]
            if pair == 0:
                health.start()
            over, got = over_http(server, prompts, params, OVER_S if pair % 2 else 0.0)
            own, expected = alone(engine, prompts, params)
            lost += sum(one != other for one, other in zip(got, expected, strict=True))
            if pair >= 0 and not pair % 2:
                extra_us.append(1e6 * (over.processor_s - own.processor_s) / options.streams / options.tokens)
                ratios.append(Took(own.wall_s / over.wall_s, own.processor_s / over.processor_s))
        health.over.set()
        told = beyond(client, options.streams)
    by_clock = [each.wall_s for each in ratios]
    by_processor = [each.processor_s for each in ratios]
    sys.stdout.write(
        f"{options.pairs} rounds of {options.streams} streams: {lost} with other tokens than the engine alone\n"
        f"throughput over HTTP / the engine's own: by the clock {statistics.median(by_clock):.3f} ({min(by_clock):.3f} to "
        f"{max(by_clock):.3f}), by processor time {statistics.median(by_processor):.3f} ({min(by_processor):.3f} to "
        f"{max(by_processor):.3f})\n"
        f"processor time that HTTP adds to a token: {statistics.median(extra_us):.0f} µs\n"
        f"/health: median {statistics.median(health.ms):.1f} ms, p99 {statistics.quantiles(health.ms, n=100)[-1]:.1f} ms of "
        f"{len(health.ms)}\n"
        f"beyond the queue: {told}\n"
    )
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())

"""What do exactness, and steps launched ahead, do to the engine's speed on this GPU? The engine beside itself, in turns.

    PYTHONPATH=src:.gpu-deps python3 tests/gpu/itself_on_cuda.py [--size 0.6B|8B] [--requests 256] [--prompt 128] [--output 256]
        [--repeats 5]

`exact` is what users get; `one step after another` is the same engine, which reads a step before it launches the next;
`unconstrained` is another one, whose products are cuBLAS as it comes, in any order of K. Attention, norms and draws are the
same in all: what the order of sums in attention costs is said by docs/performance.md. Exit code 1 if steps ahead
change a token or a bit, if none was ahead, or if cuBLAS was kept from splitting K where it should not be. JSON goes to $OUT/itself_on_cuda-SIZE-REQUESTS-PROMPT.json.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from exact_on_cuda import VOCAB
from report import reported
from speed_on_cuda import SHAPES, build

import zerodrift as zd
from zerodrift.exact.preparation import layers_of, ops_of

EXACT, IN_TURN, FREE = "exact", "one step after another", "unconstrained"
Answers = list[tuple[tuple[int, ...], tuple[float, ...]]]


def engine_of(size: str, options: argparse.Namespace) -> zd.Engine:
    running = min(256, options.requests)
    layers = SHAPES[size]["num_hidden_layers"]
    needed = running * (options.prompt + options.output + 128) * layers * 2 * 8 * 128 * 2
    return zd.Engine(
        build(size),
        max_num_batched_tokens=16_384,
        kv_cache_memory_bytes=needed,
        enable_prefix_caching=False,
        logprob_check_interval=0,
    )


def unconstrain(engine: zd.Engine) -> list[bool]:
    """Products as torch has them, also in graphs, of which none is captured yet; the list says whether each was free."""
    free: list[bool] = []

    def linear(_: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, dtype: Any = None) -> torch.Tensor:
        free.append(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k)
        if dtype is torch.float32:
            return torch.mm(x, packed.T, out_dtype=dtype)
        return torch.nn.functional.linear(x, packed, bias)

    layers = layers_of(engine.model)
    assert layers is not None, "fused layers are what runs on a GPU"
    layers.to_prove = lambda _: False  # type: ignore[method-assign]
    packs = [part.exact_pack.ops for part in engine.model.modules() if hasattr(part, "exact_pack")]
    for ops in {id(each): each for each in (ops_of(engine.model), layers.ops, *packs)}.values():
        # Not within the settings that keep cuBLAS from splitting K either.
        ops.linear, ops.computing = MethodType(linear, ops), nullcontext
    return free


@contextmanager
def in_turn(engine: zd.Engine) -> Iterator[None]:
    """Nothing is launched ahead meanwhile."""
    launch_ahead = engine._steps._launch_ahead
    engine._steps._launch_ahead = lambda _: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine._steps._launch_ahead = launch_ahead  # type: ignore[method-assign]


def run(engine: zd.Engine, options: argparse.Namespace, seed: int) -> tuple[float, int, Answers]:
    """Output tokens a second, steps that were ahead, and the answers in order."""
    source = random.Random(seed)
    names = [
        engine.add_request(
            [source.randrange(VOCAB) for _ in range(options.prompt)],
            zd.SamplingParams(max_tokens=options.output, ignore_eos=True, seed=(seed + 1) * 2**20 + number),
        )
        for number in range(options.requests)
    ]
    found, ahead, begin = {}, 0, time.perf_counter()
    while engine.has_unfinished:
        for each in engine.step():
            if each.output is not None:
                found[each.output.request_id] = (each.output.token_ids, each.output.logprobs)
        ahead += engine._steps.ahead is not None
    took = time.perf_counter() - begin
    return options.requests * options.output / took, ahead, [found[name] for name in names]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="0.6B")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with reported(f"itself_on_cuda-{options.size}-{options.requests}-{options.prompt}") as report:
        own, free, was_free = engine_of(options.size, options), None, [True]
        # Two caches of long contexts do not fit, and products are a small part of their time.
        if options.prompt < 4096:
            was_free = unconstrain(free := engine_of(options.size, options))
        gc.freeze()
        rates: dict[str, list[float]] = {EXACT: [], IN_TURN: []} | ({} if free is None else {FREE: []})
        steps_ahead = differing = other_bits = 0
        for seed in range(-1, options.repeats):
            exact, ahead, answers = run(own, options, seed)
            with in_turn(own):
                one, _, before = run(own, options, seed)
            steps_ahead += ahead
            differing += sum(a != b for a, b in zip(answers, before, strict=True))
            found = [exact, one]
            if free is not None:
                without, _, unlike = run(free, options, seed)
                other_bits += sum(a != b for a, b in zip(answers, unlike, strict=True))
                found.append(without)
            if seed >= 0:
                for name, rate in zip(rates, found, strict=True):
                    rates[name].append(round(rate))
        report["size, requests, prompt, output"] = [
            options.size,
            options.requests,
            options.prompt,
            options.output,
        ]
        report["tokens/s"] = {name: [statistics.median(each), each] for name, each in rates.items()}
        for name in list(rates)[1:]:
            ratios = [a / b for a, b in zip(rates[EXACT], rates[name], strict=True)]
            report[f"exact over {name}: median, least, most"] = [
                round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios))
            ]
        report["steps ahead"] = steps_ahead
        report["outputs that steps ahead change"] = differing
        # At 0.6B none: what cuBLAS chooses there by itself has the bits of K in order.
        report["outputs that unconstrained products change"] = other_bits
        report["control: products of the unconstrained engine, and those that might not split K"] = [
            len(was_free),
            was_free.count(False),
        ]
    return 1 if differing or not steps_ahead or not was_free or not all(was_free) else 0


if __name__ == "__main__":
    sys.exit(main())

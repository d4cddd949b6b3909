"""How many tokens a second does the engine give on this GPU, and where does a decode round spend its time?

    PYTHONPATH=src:.gpu-deps python3 tests/gpu/speed_on_cuda.py [--size 0.6B|8B|gemma3|qwen3-moe] [--requests 256] [--repeats 3]
        [--decode-rounds 8] [--max-num-batched-tokens 16384]

Random bf16 weights (other families: `models_on_cuda.py`), 128 prompt tokens, 256 output tokens, temperature 1, logprobs. The tables are one captured round
at 256 sequences of 256 tokens and one prefill of 8,192 tokens, kernel by kernel, as torch's profiler sees them. JSON goes to
$OUT/speed_on_cuda-SIZE.json.
"""

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import models_on_cuda
import torch
from report import FAMILIES, VOCAB, say
from transformers import AutoModelForCausalLM, Qwen3Config

import zerodrift as zd

PROMPT, OUTPUT = 128, 256
SHAPES = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
SIZES = (*SHAPES, *FAMILIES[1:])


def build(size: str) -> Any:
    if size in FAMILIES:
        return models_on_cuda.build(size, small=False)
    config = Qwen3Config(
        vocab_size=VOCAB,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=size == "0.6B",
        **SHAPES[size],
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def rate(engine: zd.Engine, count: int, seed: int) -> dict[str, float]:
    """Output tokens a second, seconds until everybody decodes, and those of the host outside of the runner."""
    source = random.Random(seed)
    for number in range(count):
        prompt = [source.randrange(VOCAB) for _ in range(PROMPT)]
        engine.add_request(
            prompt, zd.SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=seed * count + number)
        )
    before, begin, prefill = engine.metrics(), time.perf_counter(), 0.0
    while engine.has_unfinished:
        engine.step()
        if not prefill and not any(sample.remaining > 1 for sample in engine.scheduler.samples):
            prefill = time.perf_counter() - begin
    took, after = time.perf_counter() - begin, engine.metrics()
    return {
        "tokens/s": round((after.sampled_tokens - before.sampled_tokens) / took),
        "seconds": round(took, 3),
        "prefill": round(prefill, 3),
        "bookkeeping": round(after.bookkeeping_seconds - before.bookkeeping_seconds, 3),
    }


def kernels(engine: zd.Engine, rounds: int) -> dict[str, Any]:
    """Of one replayed round."""
    add(engine, 256, 250, 8 * rounds)
    while any(sample.remaining > 1 for sample in engine.scheduler.samples) or engine.scheduler.waiting:
        engine.step()
    engine.step()
    found = profiled(engine)
    while engine.has_unfinished:
        engine.step()
    return found


def prefill_kernels(engine: zd.Engine) -> dict[str, Any]:
    """Of a step that forwards 64 prompts of 128 tokens."""
    for _ in range(2):
        add(engine, 64, PROMPT, 1)
        found = profiled(engine)
    return found


def add(engine: zd.Engine, count: int, prompt: int, output: int) -> None:
    source = random.Random(count + prompt)
    for number in range(count):
        engine.add_request(
            [source.randrange(VOCAB) for _ in range(prompt)],
            zd.SamplingParams(max_tokens=output, ignore_eos=True, seed=number),
        )


def profiled(engine: zd.Engine) -> dict[str, Any]:
    """Microseconds of each kernel in a round of the next step, largest first."""
    engine.reset_cache()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        begin = time.perf_counter()
        engine.step()
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time
            counts[event.name] += 1
    # Rounds of the step after it may be among them: they are launched before the last ones are read.
    rounds = counts["_attend_kernel"] / engine.model.config.num_hidden_layers
    return {
        "rounds": rounds,
        "step ms by the clock": round(took * 1000, 3),
        "round ms": round(sum(times.values()) / rounds / 1000, 3),
        "kernels": [
            (name[:90], round(us / rounds, 1), counts[name] / rounds) for name, us in times.most_common(20)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--decode-rounds", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16_384)
    options = parser.parse_args()
    engine = zd.Engine(
        build(options.size),
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_cache_memory_bytes=40 * 2**30,
        decode_rounds=options.decode_rounds,
    )
    # As vLLM does in its own process: else Python's collector walks through all of torch's modules now and then, 0.2 s each.
    gc.freeze()
    rate(engine, 256, 99)
    found = [rate(engine, options.requests, seed) for seed in range(options.repeats)]
    report = {
        "device": torch.cuda.get_device_name(),
        "size": options.size,
        "requests": options.requests,
        "runs": found,
        "median tokens/s": statistics.median(each["tokens/s"] for each in found),
        "a round": kernels(engine, engine.scheduler.limits.decode_rounds),
        "a prefill": prefill_kernels(engine),
    }
    say(json.dumps(report, indent=1))
    if "OUT" in os.environ:
        Path(os.environ["OUT"], f"speed_on_cuda-{options.size}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

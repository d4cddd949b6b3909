"""How many tokens a second does the engine give on this GPU, and where does a decode round spend its time?

    PYTHONPATH=src:.gpu-deps python3 tests/gpu/speed_on_cuda.py [--size 0.6B|8B] [--requests 256] [--repeats 3]

Random bf16 weights, 128 prompt tokens, 256 output tokens, temperature 1, logprobs. The second table is one captured round
at 256 sequences of 256 tokens, kernel by kernel, as torch's profiler sees it. JSON goes to $OUT/speed_on_cuda.json.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from exact_on_cuda import VOCAB, say
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


def build(size: str) -> Any:
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
    """Microseconds of each kernel in one replayed round, largest first."""
    source = random.Random(1)
    for number in range(256):
        engine.add_request(
            [source.randrange(VOCAB) for _ in range(250)],
            zd.SamplingParams(max_tokens=8 * rounds, ignore_eos=True, seed=number),
        )
    while any(sample.remaining > 1 for sample in engine.scheduler.samples) or engine.scheduler.waiting:
        engine.step()
    engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time
            counts[event.name] += 1
    while engine.has_unfinished:
        engine.step()
    return {
        "round ms": round(sum(times.values()) / rounds / 1000, 3),
        "kernels": [
            (name[:90], round(us / rounds, 1), counts[name] / rounds) for name, us in times.most_common(24)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="0.6B")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    engine = zd.Engine(build(options.size), max_num_batched_tokens=8192, kv_cache_memory_bytes=40 * 2**30)
    rate(engine, 256, 99)
    found = [rate(engine, options.requests, seed) for seed in range(options.repeats)]
    report = {
        "device": torch.cuda.get_device_name(),
        "size": options.size,
        "requests": options.requests,
        "runs": found,
        "median tokens/s": statistics.median(each["tokens/s"] for each in found),
        **kernels(engine, engine.scheduler.limits.decode_rounds),
    }
    say(json.dumps(report, indent=1))
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "speed_on_cuda.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

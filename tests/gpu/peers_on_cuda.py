"""The same requests through other engines on this GPU: vLLM as its users run it, vLLM batch-invariant, transformers.

    PYTHONPATH=src:.gpu-deps:VLLM python3 tests/gpu/peers_on_cuda.py CONTENDER [--size 0.6B|8B|gemma3|qwen3-moe] [--requests 256] [--repeats 3]

CONTENDER is `vllm`, `vllm-batch-invariant` or `transformers`. Weights, prompts, lengths and temperature are those of
`speed_on_cuda.py`, which measures our own; logprobs of the sampled tokens are asked of everyone. One engine per process: none
gives back all of its memory. Settings are printed, JSON goes to $OUT/CONTENDER-SIZE.json.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from exact_on_cuda import VOCAB, say
from speed_on_cuda import OUTPUT, PROMPT, SIZES, build

Generate = Callable[[list[list[int]], int], int]
"""Prompts and a seed to output tokens."""
VLLM: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.8,
    "logprobs_mode": "processed_logprobs",
}
CONTENDERS: dict[str, dict[str, Any]] = {
    "vllm": VLLM,
    # The setting of it that is invariant on Hopper.
    "vllm-batch-invariant": {**VLLM, "attention_backend": "TRITON_ATTN"},
    "transformers": {"do_sample": True, "max_new_tokens": OUTPUT, "min_new_tokens": OUTPUT},
}


@contextmanager
def vllm(size: str, settings: dict[str, Any]) -> Iterator[Generate]:
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as directory:
        build(size).save_pretrained(directory)
        torch.cuda.empty_cache()
        llm = LLM(model=directory, **settings)

        def generate(prompts: list[list[int]], _seed: int) -> int:
            # Without a seed for each, as vLLM is fastest: seeds are drawn one by one there.
            params = SamplingParams(
                temperature=1.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=0, detokenize=False
            )
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(asked, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        yield generate


@contextmanager
def transformers(size: str, settings: dict[str, Any]) -> Iterator[Generate]:
    model = build(size)
    if hasattr(model.config, "num_experts"):
        # All experts at once, as it comes; the loop is for comparisons of bits.
        model.set_experts_implementation("grouped_mm")

    def generate(prompts: list[list[int]], seed: int) -> int:
        torch.manual_seed(seed)
        ids = torch.tensor(prompts, device="cuda")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=None, **settings
        )
        return int(out[:, PROMPT:].numel())

    yield generate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    settings = CONTENDERS[options.contender]
    opened = transformers if options.contender == "transformers" else vllm
    if options.contender == "vllm-batch-invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    rates = []
    with opened(options.size, settings) as generate:
        for seed in range(-1, options.repeats):
            source = random.Random(seed)
            prompts = [[source.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(options.requests)]
            begin = time.perf_counter()
            tokens = generate(prompts, seed)
            if seed >= 0:
                rates.append(round(tokens / (time.perf_counter() - begin)))
    report = {
        "contender": options.contender,
        "settings": settings,
        "size": options.size,
        "requests": options.requests,
        "tokens/s": rates,
        "median tokens/s": statistics.median(rates),
    }
    say(json.dumps(report))
    if "OUT" in os.environ:
        name = f"{options.contender}-{options.size}-{options.requests}.json"
        Path(os.environ["OUT"], name).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Runs in vLLM's own environment, and knows nothing of zerodrift: a line of jobs in, a line of answers out.

    PYTHON vllm_worker.py MODEL MAX_MODEL_LEN compiled|eager

A job is [prompt, num_tokens]. The first line out says that the engine is ready.
"""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO


def main(model: str, max_model_len: int, mode: str) -> None:
    """Serve until standard input ends."""
    # Whatever the engine prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    vllm = import_module("vllm")
    # The cache is off: from the second round on it would hold every prompt.
    engine = vllm.LLM(
        model=model,
        dtype="float32",
        max_model_len=max_model_len,
        enable_prefix_caching=False,
        enforce_eager=mode == "eager",
        generation_config="vllm",
        seed=0,
    )
    _say(answers, {"version": vllm.__version__})
    for line in sys.stdin:
        _say(answers, serve(vllm, engine, json.loads(line)))


def serve(vllm: Any, engine: Any, jobs: list[Any]) -> dict[str, Any]:
    """All jobs in one call, timed."""
    # No text is made, and no request has a seed, which would cost it a generator each.
    params = [
        vllm.SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0, detokenize=False)
        for _, count in jobs
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in jobs]
    begin, processor = time.perf_counter(), processor_seconds()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds, processor = time.perf_counter() - begin, processor_seconds() - processor
    samples = [output.outputs[0] for output in outputs]
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "token_ids": [list(sample.token_ids) for sample in samples],
        "logprobs": [
            [at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs, strict=True)]
            for sample in samples
        ],
    }


def processor_seconds() -> float:
    """Of every process in our group: vLLM computes in children of its own."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command, in parentheses, may hold anything; behind it come state, parent, group, …
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[2]) == os.getpgrp():
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _say(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

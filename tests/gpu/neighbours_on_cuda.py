"""Does anybody see a neighbour that turns NaN, or is preempted, while captured rounds run? Qwen3-MoE's shape says.

    PYTHONPATH=src:.gpu-deps python3 tests/gpu/neighbours_on_cuda.py [--sequences 96] [--small]

The embedding of a token that one request alone will draw is NaN: from the round in which that token is read, its numbers are,
and so are its keys. Then the same requests get a pool that holds a third of their keys. Whoever is not concerned keeps tokens and
bits. (Other families tie their head to the embedding, where one such row is everybody's.) Exit code 1 otherwise, or if nobody
was concerned. JSON goes to $OUT/neighbours_on_cuda.json where $OUT is set.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from engine_on_cuda import CONTEXT, OUTPUT, differing, requests
from models_on_cuda import build
from report import reported, size

import zerodrift as zd
from zerodrift.core.completion import FinishReason
from zerodrift.engine.output import Output

FAMILY = "qwen3-moe"
POISONED, AT = 8, 20
"""So many requests, by the token that they draw there."""


def engine_of(model: Any, tokens: int) -> zd.Engine:
    """With room for the keys of so many tokens."""
    config = model.config
    each = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return zd.Engine(
        model,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=tokens * each,
        enable_prefix_caching=False,
        logprob_check_interval=0,
    )


def poisoned(
    model: Any,
    prompts: list[list[int]],
    params: list[zd.SamplingParams],
    crowd: Sequence[Output],
    report: dict[str, Any],
) -> None:
    """Requests that read NaN in mid-flight end there; what they drew before, and everybody else, is as it was."""
    uses = Counter(token for ids in prompts for token in set(ids))
    uses.update(token for output in crowd for token in output.token_ids)
    marked = [i for i, output in enumerate(crowd) if uses[output.token_ids[AT]] == 1][:POISONED]
    engine = engine_of(model, 64 * 1024)
    with torch.no_grad():
        rows = torch.tensor([crowd[i].token_ids[AT] for i in marked], device="cuda")
        engine.model.get_input_embeddings().weight[rows] = torch.nan
    found = engine.generate(prompts, params, on_error="return")
    others = [i for i in range(len(crowd)) if i not in marked]
    report["requests that turn NaN in a captured round"] = len(marked)
    differ = report["differing"]
    differ["outputs, beside NaN"] = differing([crowd[i] for i in others], [found[i] for i in others])
    differ["requests that read NaN, and do not end there by its name"] = sum(
        found[i].finish_reason is not FinishReason.ERROR
        or found[i].token_ids != crowd[i].token_ids[: AT + 1]
        or found[i].logprobs != crowd[i].logprobs[: AT + 1]
        for i in marked
    )
    kept = [i for i in others if i % 2]
    again = engine.generate([prompts[i] for i in kept], [params[i] for i in kept])
    differ["outputs, in blocks that held NaN"] = differing([crowd[i] for i in kept], again)


def preempted(
    model: Any,
    prompts: list[list[int]],
    params: list[zd.SamplingParams],
    crowd: Sequence[Output],
    report: dict[str, Any],
) -> None:
    """A pool that all requests together do not fit into."""
    engine = engine_of(model, sum(len(prompt) + OUTPUT for prompt in prompts) // 3)
    found = engine.generate(prompts, params)
    report["preemptions"] = engine.metrics().preemptions
    report["differing"]["outputs, preempted and computed again"] = differing(crowd, found)


def main() -> int:
    options = size()
    with reported("neighbours_on_cuda") as report:
        model = build(FAMILY, small=options.small)
        prompts = [ids for ids in requests(options.sequences)[0] if len(ids) + OUTPUT < CONTEXT]
        params = [zd.SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=i) for i in range(len(prompts))]
        crowd = engine_of(model, 64 * 1024).generate(prompts, params)
        report["differing"] = {}
        poisoned(model, prompts, params, crowd, report)
        preempted(model, prompts, params, crowd, report)
    concerned = report["requests that turn NaN in a captured round"] and report["preemptions"]
    return 1 if any(report["differing"].values()) or not concerned else 0


if __name__ == "__main__":
    sys.exit(main())

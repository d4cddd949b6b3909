"""Does `zerodrift.Engine` report the trainer's own bits on this GPU? A model of Qwen3-0.6B's shape says, or one of Gemma 3's or Qwen3-MoE's.

    PYTHONPATH=src:.gpu-deps python3 tests/gpu/engine_on_cuda.py [--family qwen3] [--sequences 224] [--small]

Requests of mixed length and mixed sampling parameters go through the engine as a user sends them: in a crowd, one by
one with other pages and budgets, with and without the prefix cache, and after a swap of weights in mid-flight. Counts
and rates go to standard output, and as JSON to $OUT/engine_on_cuda.json (-FAMILY) where $OUT is set. Exit code 1 if a bit differs.
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from models_on_cuda import build
from report import VOCAB, report_name, reported, size, timed

import zerodrift as zd
from zerodrift.core.errors import NonFinite
from zerodrift.engine.output import Output

OUTPUT, CONTEXT = 64, 32_768
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05},
    {"temperature": 0.0},
    {"temperature": 1.3, "min_p": 0.02, "logprobs": 5},
)


def requests(count: int) -> tuple[list[list[int]], list[zd.SamplingParams]]:
    """Prompts around the edges of blocks and chunks, one that fills 32,768 positions; every fourth begins as the one before it."""
    source = random.Random(0)
    edges = [1, 15, 16, 17, 63, 64, 65, 128, 511, 512, 513, 1024, 1552, CONTEXT - OUTPUT]
    prompts: list[list[int]] = []
    for number in range(count):
        length = edges[number] if number < len(edges) else source.randint(1, 600)
        prompt = [source.randrange(VOCAB) for _ in range(length)]
        if number % 4 == 3:
            prompt = prompts[-1][: length // 2] + prompt[length // 2 :]
        prompts.append(prompt)
    params = [
        zd.SamplingParams(**SAMPLINGS[number % len(SAMPLINGS)], max_tokens=OUTPUT, seed=number)
        for number in range(count)
    ]
    return prompts, params


def differing(one: Sequence[Output], other: Sequence[Output]) -> int:
    """Outputs whose tokens or numbers are not the same, bit for bit."""
    return sum(
        a.token_ids != b.token_ids or a.logprobs != b.logprobs for a, b in zip(one, other, strict=True)
    )


@torch.no_grad()
def against_trainer(model: Any, outputs: Sequence[Output]) -> int:
    """Tokens whose logprob is not what the trainer's packed forward gives, bit for bit."""
    count = 0
    for begin in range(0, len(outputs), 16):
        group = outputs[begin : begin + 16]
        for own, output in zip(zd.exact.token_logprobs(model, group), group, strict=True):
            count += int((own.cpu() != torch.tensor(output.logprobs)).sum())
    return count


def check(model: Any, count: int, report: dict[str, Any]) -> None:
    prompts, params = requests(count)
    engine = zd.Engine(model, max_num_seqs=256, max_num_batched_tokens=8192, kv_cache_memory_bytes=24 * 2**30)
    trainer = zd.exact.prepare(model)
    engine.generate(prompts[:16], params[:16])  # compiles the kernels
    engine.reset_cache()
    crowd, took = timed(lambda: engine.generate(prompts, params))
    tokens = sum(len(output.token_ids) for output in crowd)
    report["tokens"], report["output_tokens_per_s"] = tokens, round(tokens / took)
    report["prompt_tokens"] = sum(map(len, prompts))
    assert not any(output.problem for output in crowd), [output.problem for output in crowd]
    differ = report["differing"] = {}
    differ["tokens, engine vs trainer"] = against_trainer(trainer, crowd)
    again = engine.generate(prompts, params)
    report["cached_tokens"] = sum(output.cached_tokens or 0 for output in again)
    differ["outputs, cold vs cached prefixes"] = differing(crowd, again)
    other = zd.Engine(
        model,
        block_size=32,
        max_num_seqs=7,
        max_num_batched_tokens=300,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=6 * 2**30,
    )
    some = range(0, count, max(1, count // 40))
    alone = [other.generate([prompts[i]], [params[i]])[0] for i in some]
    differ["outputs, crowd vs alone"] = differing([crowd[i] for i in some], alone)
    few = [i for i in range(count) if i % 3]
    differ["outputs, crowd vs sevens in chunks of 300"] = differing(
        [crowd[i] for i in few[:60]],
        other.generate([prompts[i] for i in few[:60]], [params[i] for i in few[:60]]),
    )
    captured(engine, other, trainer, prompts, report)
    swapped(engine, trainer, prompts, params, differ)


def captured(
    engine: zd.Engine, other: zd.Engine, trainer: Any, prompts: list[list[int]], report: dict[str, Any]
) -> None:
    """Requests with a temperature alone, whose decodes are replayed graphs of many sizes, and of no graph."""
    differ = report["differing"]
    params = [
        zd.SamplingParams(
            temperature=(1.0, 0.7, 0.0)[number % 3], max_tokens=OUTPUT - 8 * (number % 7), seed=number
        )
        for number in range(len(prompts))
    ]
    crowd = engine.generate(prompts, params)
    sizes = sorted(engine.runner.graphs.sizes) if engine.runner.graphs is not None else []
    report["graphs captured"] = sizes
    assert len(sizes) > 2, "the graphs were not used: nothing is shown"
    differ["tokens, replayed vs trainer"] = against_trainer(trainer, crowd)
    few = list(range(0, len(prompts), 9))
    differ["outputs, replayed in a crowd vs replayed in sevens"] = differing(
        [crowd[i] for i in few], other.generate([prompts[i] for i in few], [params[i] for i in few])
    )
    # As many as run at once: with others waiting, nothing is launched ahead.
    aborted(engine, prompts[:256], params[:256], crowd[:256], report)
    graphs, engine.runner.graphs = engine.runner.graphs, None
    differ["outputs, replayed vs launched one by one"] = differing(
        [crowd[i] for i in few], engine.generate([prompts[i] for i in few], [params[i] for i in few])
    )
    engine.runner.graphs = graphs


def aborted(
    engine: zd.Engine,
    prompts: list[list[int]],
    params: list[zd.SamplingParams],
    crowd: Sequence[Output],
    report: dict[str, Any],
) -> None:
    """Requests that are given up while captured rounds of theirs run, and the next ones are launched: nobody else sees it."""
    names = [engine.add_request(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    gone, found, ahead, number = set(names[::5]), dict[str, Output](), 0, 0
    while engine.has_unfinished:
        for each in engine.step():
            if each.output is not None:
                found[each.output.request_id] = each.output
        if engine._steps.ahead is not None:
            ahead += 1
            for name in sorted(gone & engine.scheduler.requests.keys())[: number % 5]:
                engine.abort(name)
            number += 1
    report["steps launched ahead"] = ahead
    assert ahead > 2, "no step was launched ahead: nothing is shown"
    kept = [index for index, name in enumerate(names) if name not in gone]
    report["differing"]["outputs, beside aborted ones"] = differing(
        [crowd[index] for index in kept], [found[names[index]] for index in kept]
    )


def swapped(
    engine: zd.Engine,
    trainer: Any,
    prompts: list[list[int]],
    params: list[zd.SamplingParams],
    differ: dict[str, int],
) -> None:
    """New weights while requests run: what begins after the swap is the new trainer's, and nothing of the old."""
    for prompt, sampling in zip(prompts[:32], params[:32], strict=True):
        engine.add_request(prompt, sampling)
    for _ in range(10):
        engine.step()
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.01)
    zd.exact.refresh(trainer)
    engine.swap_weights(trainer.state_dict(), "after")
    while engine.has_unfinished:
        engine.step()
    after = engine.generate(prompts[:64], params[:64])
    differ["tokens, engine vs trainer after a swap"] = against_trainer(trainer, after)
    plain = [
        zd.SamplingParams(temperature=1.0, max_tokens=OUTPUT, seed=number)
        for number in range(len(prompts[:64]))
    ]
    replayed = engine.generate(prompts[:64], plain)
    differ["tokens, replayed vs trainer after a swap"] = against_trainer(trainer, replayed)


def overflowing_is_refused(model: Any) -> int:
    """1 if weights that are finite one by one, and overflow together, are staged all the same."""
    engine = zd.Engine(model, kv_cache_memory_bytes=2**30)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.norm.weight"].fill_(3e38)
    try:
        engine.stage_weights(state, "overflows")
    except NonFinite:
        return 0
    return 1


def main() -> int:
    options = size()
    with reported(report_name("engine_on_cuda", options.family)) as report:
        model = build(options.family, small=options.small)
        check(model, options.sequences, report)
        report["differing"]["weights that overflow, taken"] = overflowing_is_refused(model)
    return 1 if any(report["differing"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())

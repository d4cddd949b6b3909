"""What does a step of an exact trainer cost on this GPU, and are its gradients right?

    PYTHONPATH=src:.gpu-deps python3 tests/gpu/trainer_on_cuda.py [--size 0.6B|8B] [--repeats 5] [--small] [--family qwen3]

Time: forward and backward of `exact.token_logprobs`, and of the same model as it comes with SDPA and cuBLAS, in turn in one
process. Gradients: of two layers of Qwen3-0.6B's shape, Gemma 3's or Qwen3-MoE's, against vanilla in fp64, beside those of vanilla in bf16; attention's own against
the plain formula in fp64. Bits: with gradients as without, and a backward like the one before it. Each has a control that
differs. Exit code 1 otherwise. JSON goes to $OUT/trainer_on_cuda-SIZE.json.
"""

import argparse
import copy
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from exact_on_cuda import completion
from models_on_cuda import build as sharp
from report import FAMILIES, VOCAB, report_name, reported, timed
from speed_on_cuda import build

from zerodrift import exact
from zerodrift.exact.interface import _backward
from zerodrift.exact.ops.interface import HeadShape, Segments
from zerodrift.exact.ops.triton.op_set import CudaOps

PROMPT = 128
BATCHES = {"0.6B": ((32, 512), (4, 4096)), "8B": ((8, 512),)}
"""Sequences and their length."""
LENGTHS = (300, 65, 130, 64, 200, 51)
HEADS = ((4, 1, 256), (4, 2, 128), (2, 2, 64), (8, 2, 32))
SLACK = {"qwen3-moe": 1.5}
"""Times vanilla's distance from fp64 that is near enough; else 1.2. Where two experts are close, either in bf16 may take the
other one than fp64: that noise is large, and not the same for both."""
Step = Callable[[], torch.Tensor]


def tokens(count: int, length: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def exact_step(model: Any, sequences: list[list[int]], prompt: int) -> Step:
    completions = [completion(ids, len(ids) - prompt) for ids in sequences]
    return lambda: torch.cat(exact.token_logprobs(model, completions))


def vanilla_step(model: Any, sequences: list[list[int]], prompt: int) -> Step:
    """As trainers do it: a batch of equal lengths, so that SDPA needs no mask."""
    ids = torch.tensor(sequences, device="cuda")

    def step() -> torch.Tensor:
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, prompt - 1 :]
        logits = model.lm_head(hidden).to(torch.promote_types(model.dtype, torch.float32))
        logprobs: torch.Tensor = torch.log_softmax(logits, -1)
        return logprobs.gather(-1, ids[:, prompt:, None]).flatten()

    return step


def cost(model: Any, step: Step) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    model.zero_grad(set_to_none=True)
    logprobs, forward = timed(step)
    _, backward = timed(lambda: logprobs.mean().backward())
    return forward, backward


def times(size: str, repeats: int, report: dict[str, Any]) -> None:
    vanilla = build(size).train()
    vanilla.set_attn_implementation("sdpa")
    own = exact.prepare(copy.deepcopy(vanilla))
    for count, length in BATCHES[size]:
        sequences = tokens(count, length)
        contenders = {
            "exact": (own, exact_step(own, sequences, PROMPT)),
            "vanilla": (vanilla, vanilla_step(vanilla, sequences, PROMPT)),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        memory = {}
        for number in range(repeats + 2):
            for name, (model, step) in contenders.items():
                torch.cuda.reset_peak_memory_stats()
                taken = cost(model, step)
                memory[name] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
                if number >= 2:
                    found[name].append(taken)
                model.zero_grad(set_to_none=True)
        ratios = [sum(a) / sum(b) for a, b in zip(found["exact"], found["vanilla"], strict=True)]
        report[f"{count} sequences of {length}"] = {
            **{
                f"{name} ms, forward and backward": [
                    round(1e3 * statistics.median(each), 1) for each in zip(*parts, strict=True)
                ]
                for name, parts in found.items()
            },
            "exact over vanilla, median and all": [
                round(statistics.median(ratios), 3),
                [round(ratio, 3) for ratio in ratios],
            ],
            "GiB at most": memory,
        }
        report.setdefault("kernels", kernels(*contenders["exact"]))
        report.setdefault("vanilla kernels", kernels(*contenders["vanilla"]))


def kernels(model: Any, step: Step) -> list[tuple[str, float, int]]:
    """Milliseconds of each kernel in a step, largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        cost(model, step)
    model.zero_grad(set_to_none=True)
    sums: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            sums.setdefault(event.name[:70], []).append(event.device_time / 1e3)
    ordered = sorted(sums.items(), key=lambda item: -sum(item[1]))
    return [(name, round(sum(each), 2), len(each)) for name, each in ordered[:14]]


def gradients(model: Any, steps: list[Step]) -> dict[str, torch.Tensor]:
    """Of a weighted sum of all logprobs, by parameter."""
    model.zero_grad(set_to_none=True)
    for step in steps:
        logprobs = step()
        weights = torch.linspace(-1, 2, len(logprobs), device="cuda", dtype=logprobs.dtype)
        (logprobs * weights).sum().backward()
    return {name: part.grad.double().clone() for name, part in model.named_parameters()}


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[float]:
    """‖found − wanted‖ / ‖wanted‖ over parameters: median and largest."""
    each = [float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted]
    return [statistics.median(each), max(each)]


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    return sum(int((one[name] != other[name]).sum()) for name in one)


def check_gradients(model: Any, slack: float, report: dict[str, Any]) -> bool:
    """`model` is vanilla, in bf16 and with few layers."""
    sequences = [ids for length in LENGTHS for ids in tokens(1, length, length)]
    wide = copy.deepcopy(model).double()
    wanted = gradients(wide, [vanilla_step(wide, [ids], 20) for ids in sequences])
    others = gradients(wide, [vanilla_step(wide, [ids], 20) for ids in sequences[::-1][1:]])
    plain = gradients(model, [vanilla_step(model, [ids], 20) for ids in sequences])
    own = exact.prepare(copy.deepcopy(model))
    steps = [exact_step(own, [ids], 20) for ids in sequences]
    found, again = gradients(own, steps), gradients(own, steps)
    packed = exact_step(own, sequences, 20)
    with torch.no_grad():
        bits = int((torch.cat([step() for step in steps]) != packed()).sum())
    bits += int((packed().detach() != torch.cat([step().detach() for step in steps])).sum())
    report["gradients"] = {
        "exact from fp64, median and largest of parameters": apart(found, wanted),
        "vanilla bf16 from fp64": apart(plain, wanted),
        "control: without one sequence, from fp64": apart(others, wanted),
        "numbers that differ in a second backward": differing(found, again),
        "control: sequences in another order, numbers that differ": differing(
            found, gradients(own, steps[::-1])
        ),
        "logprobs that differ, packed or alone, with and without gradients": bits,
    }
    near = apart(found, wanted)[0] <= slack * apart(plain, wanted)[0] < apart(others, wanted)[0]
    controlled = report["gradients"]["control: sequences in another order, numbers that differ"] > 0
    return near and controlled and not bits and not differing(found, again)


def check_attention(report: dict[str, Any]) -> bool:
    """dQ, dK and dV of bf16 heads against the plain formula in fp64; the control looks through another window."""
    ops, bounds = CudaOps(), (0, 300, 365, 366, 430)
    segments = Segments(bounds[:-1], bounds[1:])
    worst, control = 0.0, 1e9
    for heads, kv_heads, size in HEADS:
        for window in (None, 100):
            torch.manual_seed(size)
            q, k, v, dout = (
                torch.randn(bounds[-1], each, size, device="cuda").bfloat16()
                for each in (heads, kv_heads, kv_heads, heads)
            )
            sums = torch.empty(bounds[-1], heads, device="cuda")
            shape = HeadShape(size**-0.5, window)
            out = ops.attend(q, (k, v), segments, shape, sums)
            found = ops._attend_backward((q, k, v, out, sums), dout, segments, shape)
            for other, seen in ((False, shape), (True, HeadShape(size**-0.5, 90))):
                wanted = [torch.zeros_like(part, dtype=torch.float64) for part in (q, k, v)]
                for begin, end in zip(*segments, strict=True):
                    inside = slice(begin, end)
                    _backward(
                        tuple(part[inside] for part in (q, k, v, out, dout)),
                        tuple(part[inside] for part in wanted),
                        seen,
                    )
                off = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
                worst, control = (worst, min(control, *off)) if other else (max(worst, *off), control)
    report["attention: largest distance from fp64, and the control's smallest"] = [worst, control]
    return worst < 0.01 < control


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=BATCHES, default="0.6B")
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0], help="times are of the first")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="gradients and bits alone")
    options = parser.parse_args()
    with reported(report_name(f"trainer_on_cuda-{options.size}", options.family)) as report:
        right = check_attention(report)
        few = sharp(options.family, small=True).train()
        right &= check_gradients(few, SLACK.get(options.family, 1.2), report)
        del few
        if not options.small and options.family == FAMILIES[0]:
            times(options.size, options.repeats, report)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

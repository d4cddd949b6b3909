"""Products, log-probabilities and draws on this GPU: are the bits those they must be, and what do they cost?

    PYTHONPATH=src:.gpu-deps python3 tests/gpu/ops_on_cuda.py [--draws 20480]

Products: every matrix of Qwen3-0.6B's and 8B's shapes by cuBLAS without split-K and by the Triton kernel, at row counts
that nobody proved beforehand. Vocabulary: log-softmax against fp64, the draw's logprob against log-softmax's bits, tokens
against `sampler.choose`, rows in any company. Each count has a control that must differ. Exit code 1 otherwise.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from report import VOCAB, reported, say

from zerodrift.exact.ops.triton import cublas, gemm, vocabulary
from zerodrift.exact.ops.triton.proof import cublas_agrees
from zerodrift.exact.probe import hard, same_bits
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import uniform

SHAPES = {
    "0.6B q": (2048, 1024),
    "0.6B kv": (1024, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate": (3072, 1024),
    "0.6B down": (1024, 3072),
    "0.6B head": (VOCAB, 1024),
    "8B q, o": (4096, 4096),
    "8B kv": (1024, 4096),
    "8B gate": (12288, 4096),
    "8B down": (4096, 12288),
    "8B head": (VOCAB, 4096),
}
OTHER_COUNTS = (65, 100, 127, 129, 200, 255, 257, 333, 500, 777, 1001, 1500, 3000, 5001)


def microseconds(work: Callable[[], object], rounds: int = 20) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds * 1e3


def _times(x: torch.Tensor, weight: torch.Tensor) -> list[float]:
    ways: tuple[Callable[[], object], ...] = (
        lambda: gemm.linear(x, weight, None, torch.bfloat16),
        lambda: cublas.linear(x, weight, None, torch.bfloat16),
        lambda: torch.mm(x, weight.T),
    )
    return [round(microseconds(way), 1) for way in ways]


def products(report: dict[str, Any]) -> int:
    wrong, controls, asked = 0, 0, 0
    for name, (columns, depth) in SHAPES.items():
        weight = (torch.randn(columns, depth, device="cuda") / depth**0.5).bfloat16()
        agrees = cublas_agrees(weight)
        most = min(5001, cublas.row_counts(columns)[-1])
        x = hard(most, depth).to("cuda", torch.bfloat16)
        bias = torch.randn(columns, device="cuda").bfloat16()
        row: dict[str, Any] = {"proven": agrees}
        for dtype in (torch.float32, torch.bfloat16):
            for given in (None, bias):
                in_order = gemm.linear(x, weight, given, dtype)
                for count in (count for count in OTHER_COUNTS if count <= most):
                    asked += 1
                    found = cublas.linear(x[:count], weight, given, dtype)
                    wrong += not same_bits(found, in_order[:count])
        # The control: cuBLAS as it comes, which splits K for few rows.
        in_order = gemm.linear(x[:64], weight, None, torch.float32)
        for count in (1, 8, 16, 64):
            plain = torch.mm(x[:count], weight.T, out_dtype=torch.float32)
            controls += not same_bits(plain, in_order[:count])
        row["us: triton, cublas without split-K, cublas as it comes"] = {
            count: _times(x[:count], weight) for count in (16, 64, 96, 128, 256, 1024)
        }
        report[name] = row
        say(f"{name} {json.dumps(row)}")
    report["products asked, wrong, controls that differ"] = [asked, wrong, controls]
    return wrong + (controls == 0)


def vocabulary_rows(report: dict[str, Any], draws: int) -> int:
    torch.manual_seed(1)
    logits = torch.randn(256, VOCAB, device="cuda") * 3
    logits[::5] *= 4
    found = vocabulary.log_softmax(logits)
    exact = torch.log_softmax(logits.double(), dim=-1)
    report["log-softmax, largest error"] = float((found.double() - exact).abs().max())
    alone = torch.cat([vocabulary.log_softmax(row[None]) for row in logits[:40]])
    shifted = vocabulary.log_softmax(logits[7:31])
    wrong = int(not same_bits(alone, found[:40])) + int(not same_bits(shifted, found[7:31]))
    # Rows of an odd length begin at all places in memory; torch's own sums start where an address is round.
    odd = logits[:8, :50_257].contiguous()
    whole, plain = vocabulary.log_softmax(odd), torch.log_softmax(odd, -1)
    wrong += sum(
        not same_bits(vocabulary.log_softmax(row[None]), each[None])
        for row, each in zip(odd, whole, strict=True)
    )
    plain_differs = sum(
        int((torch.log_softmax(row.clone(), -1) != each).sum()) for row, each in zip(odd, plain, strict=True)
    )
    source, temperatures = random.Random(0), [(0.7, 1.0, 1.3, 0.0)[row % 4] for row in range(256)]
    used = [temperature or 1.0 for temperature in temperatures]
    scaled = torch.stack(
        [row / value if value != 1 else row for row, value in zip(logits, used, strict=True)]
    )
    reported = vocabulary.log_softmax(scaled)
    wide = torch.log_softmax(scaled.double(), -1).float().cpu()
    tokens_differ = bits_differ = edges = entropy_off = 0
    entropy = (
        -(torch.log_softmax(scaled.double(), -1).exp() * torch.log_softmax(scaled.double(), -1)).sum(-1).cpu()
    )
    for _ in range(0, draws, 512):
        rows = [source.randrange(256) for _ in range(512)]
        asked = vocabulary.Draws(
            rows,
            [source.randrange(2**63) for _ in rows],
            [source.randrange(9) for _ in rows],
            [source.randrange(9999) for _ in rows],
            [source.randrange(VOCAB) if number % 16 == 0 else None for number in range(512)],
            [temperatures[row] == 0 for row in rows],
        )
        drawn = vocabulary.draw(logits, used, asked)
        picked = reported[torch.tensor(rows), torch.tensor(drawn.tokens_D)].cpu()
        bits_differ += int((picked != torch.tensor(drawn.logprobs_D)).sum())
        entropy_off += int((entropy[rows] - torch.tensor(drawn.entropies_D)).abs().max() > 1e-6)
        for number, row in enumerate(rows[:64]):
            number_drawn = drawn.tokens_D[number]
            if asked.forced_D[number] is not None:
                expected = asked.forced_D[number]
            elif asked.greedy_D[number]:
                expected = int(logits[row].argmax())
            else:
                u = uniform(asked.seeds_D[number], asked.sample_indices_D[number], asked.positions_D[number])
                expected = choose(wide[row], u)
                if number_drawn != expected:
                    cumulative = wide[row].double().exp().cumsum(0)
                    edge = min(number_drawn, expected)
                    edges += bool(abs(float(cumulative[edge] / cumulative[-1]) - u) < 1e-6)
                    continue
            tokens_differ += number_drawn != expected
    report["draws: logprobs that differ, tokens that differ, at an edge, entropies off"] = [
        bits_differ,
        tokens_differ,
        edges,
        entropy_off,
    ]
    report["plain log-softmax of rows elsewhere in memory: entries that differ"] = plain_differs
    broken = logits[:4].clone()
    broken[1, 777], broken[2, -1] = torch.nan, torch.inf
    few = vocabulary.Draws([0, 1, 2, 3], [1] * 4, [0] * 4, [0] * 4, [None] * 4, [False] * 4)
    finite = vocabulary.draw(broken, [1.0] * 4, few).finite_D
    report["finite"] = finite
    batch = vocabulary.Draws(list(range(256)), [1] * 256, [0] * 256, [5] * 256, [None] * 256, [False] * 256)
    report["us: draw of 256 rows, log-softmax of 256 rows, torch's log-softmax"] = [
        round(microseconds(lambda: vocabulary.draw(logits, used, batch)), 1),
        round(microseconds(lambda: vocabulary.log_softmax(logits)), 1),
        round(microseconds(lambda: torch.log_softmax(logits, -1)), 1),
    ]
    return (
        wrong
        + bits_differ
        + tokens_differ
        + entropy_off
        + (finite != [True, False, False, True])
        + (plain_differs == 0)
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=20_480)
    options = parser.parse_args()
    with reported("ops_on_cuda") as report:
        report["wrong"] = vocabulary_rows(report, options.draws) + products(report)
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

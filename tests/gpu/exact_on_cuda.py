"""Are decode, prefill and the trainer's forward the same bits on this GPU? A model of Qwen3-0.6B's shape says.

    PYTHONPATH=src:.gpu-deps python3 tests/gpu/exact_on_cuda.py [--family qwen3] [--sequences 224] [--small]

Or one of Gemma 3's or Qwen3-MoE's (`models_on_cuda.py`).

Random bf16 weights, sequences of mixed length with forced tokens. Needs torch, triton, transformers and msgspec
(.gpu-deps may hold the last, unpacked from its wheel, where it is not installed). Counts and rates go to standard output,
and as JSON to $OUT/exact_on_cuda.json (-FAMILY) where $OUT is set. Exit code 1 if a bit differs in exact mode, or if none
differs with cuBLAS or SDPA put back.
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from models_on_cuda import build
from report import VOCAB, report_name, reported, say, size, timed

from zerodrift import exact
from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.errors import Unproven
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.exact.normalisation import log_softmax
from zerodrift.exact.ops.interface import ExpertRows
from zerodrift.exact.ops.triton.expert_ops import GroupedExperts
from zerodrift.exact.ops.triton.expert_proof import prove_experts
from zerodrift.exact.ops.triton.grouped import Groups
from zerodrift.exact.ops.triton.op_set import CudaOps
from zerodrift.exact.ops.triton.proof import prove_attention
from zerodrift.exact.verification import Schedule, alone, batch_of, differing_rows, packed, padded, paged

OUTPUT = 48
"""Tokens that are decoded one by one at the end of each sequence."""
MANY_PAIRS = 1024
"""Of tokens and experts: more than a decode of these sequences has, fewer than a prefill."""


def workload(count: int) -> list[list[int]]:
    """Around the edges of blocks, pages and splits, up to 1,600 tokens."""
    source = random.Random(0)
    edges = [1, 15, 16, 17, 63, 64, 65, 128, 464, 511, 512, 513, 1024, 1552]
    prompts = [edges[i] if i < len(edges) else source.randint(1, 600) for i in range(count)]
    return [[source.randrange(VOCAB) for _ in range(length + OUTPUT)] for length in prompts]


class Prefilled(Schedule):
    """Prompts in chunks of 256, sixteen at a time, then one token of every sequence per step."""

    def steps(self, lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
        prompts = [length - OUTPUT for length in lengths]
        steps = []
        for begin in range(0, max(prompts), 256):
            chunks = [(i, begin, min(begin + 256, end)) for i, end in enumerate(prompts) if begin < end]
            steps += [chunks[at : at + 16] for at in range(0, len(chunks), 16)]
        for offset in range(OUTPUT):
            steps.append([(i, end + offset, end + offset + 1) for i, end in enumerate(prompts)])
        return steps


@torch.no_grad()
def decoded(
    model: Any, sequences: list[list[int]]
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, float]]:
    """As an engine: hidden states of all tokens, logprobs of the outputs, each from the step that ran it."""
    schedule = Prefilled(1, 16)
    lengths = [len(ids) for ids in sequences]
    tables, blocks = schedule.tables(lengths)
    kv = exact.PagedKV(model, blocks, 16)
    hidden: list[list[torch.Tensor]] = [[] for _ in sequences]
    logprobs: list[list[torch.Tensor]] = [[] for _ in sequences]
    seconds = {"prefill": 0.0, "decode": 0.0}
    for step in schedule.steps(lengths):
        single = all(end - begin == 1 and begin >= lengths[i] - OUTPUT for i, begin, end in step)

        def run(step: list[tuple[int, int, int]] = step) -> None:
            batch = batch_of(model, sequences, tables, 16, step)
            rows = exact.forward_paged(model, batch, kv)
            for (index, _, _), part in zip(
                step, rows.split([end - begin for _, begin, end in step]), strict=True
            ):
                hidden[index].append(part)
            lasts = [
                (at, index, end)
                for at, (index, _, end) in enumerate(step)
                if lengths[index] - OUTPUT <= end < lengths[index]
            ]
            if lasts:
                ends = torch.tensor(batch.bounds[1:], device="cuda")[[at for at, _, _ in lasts]] - 1
                logits = exact.head(model, rows[ends])
                targets = torch.tensor([sequences[index][end] for _, index, end in lasts], device="cuda")
                values = log_softmax(logits).gather(-1, targets[:, None])[:, 0]
                for (_, index, _), value in zip(lasts, values, strict=True):
                    logprobs[index].append(value)

        _, took = timed(run)
        seconds["decode" if single else "prefill"] += took
    return [torch.cat(parts) for parts in hidden], [torch.stack(values) for values in logprobs], seconds


def completion(ids: list[int], output: int = OUTPUT) -> Completion:
    version = WeightVersion("initial", "0" * 64)
    return Completion(
        prompt_token_ids=tuple(ids[:-output]),
        token_ids=tuple(ids[-output:]),
        logprobs=(-1.0,) * output,
        kind=LogprobKind.PROCESSED,
        sampling=SamplingParams(max_tokens=output),
        finish_reason=FinishReason.LENGTH,
        versions=(VersionSpan(version, 0, output),),
        fingerprint="none",
    )


def micro_batches(sequences: list[list[int]], tokens: int = 8192) -> list[list[int]]:
    """Indices of sequences that are packed together."""
    groups: list[list[int]] = [[]]
    for index, ids in enumerate(sequences):
        if groups[-1] and sum(len(sequences[i]) for i in groups[-1]) + len(ids) > tokens:
            groups.append([])
        groups[-1].append(index)
    return groups


def check(model: Any, sequences: list[list[int]], report: dict[str, Any]) -> None:
    rows = sum(map(len, sequences))
    report["sequences"], report["tokens"] = len(sequences), rows
    decoded(model, sequences[:20])  # compiles the kernels
    crowd, logprobs, seconds = decoded(model, sequences)
    outputs = len(sequences) * OUTPUT
    report["decode_tokens_per_s"] = round(outputs / seconds["decode"])
    report["prefill_tokens_per_s"] = round((rows - outputs) / seconds["prefill"])
    differ = report["differing_rows"] = {}
    groups = micro_batches(sequences)
    with torch.no_grad():
        own, took = timed(lambda: [h for g in groups for h in packed(model, [sequences[i] for i in g])])
    report["trainer_forward_tokens_per_s"] = round(rows / took)
    differ["decode vs trainer packed"] = differing_rows(crowd, own)
    by_length = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    for left in (False, True):
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for begin in range(0, len(by_length), 16):
                chosen = by_length[begin : begin + 16]
                chosen = chosen[::2] + chosen[1::2]
                found.update(
                    zip(chosen, padded(model, [sequences[i] for i in chosen], left=left), strict=True)
                )
        differ[f"decode vs trainer padded {'left' if left else 'right'}"] = differing_rows(
            crowd, [found[i] for i in range(len(sequences))]
        )
    with torch.no_grad():
        differ["crowd vs alone, whole prefill"] = differing_rows(crowd, alone(model, sequences))
    few = by_length[:: max(1, len(by_length) // 6)]
    for index in few:
        single, _, _ = decoded(model, [sequences[index]])
        differ["crowd vs decoded alone"] = differ.get("crowd vs decoded alone", 0) + differing_rows(
            [crowd[index]], single
        )
    mixed = paged(model, sequences, Schedule(7, 32, chunks=(1, 2, 17, 64, 200, 700), share=0.9))
    differ["decode vs random chunks, other pages"] = differing_rows(crowd, mixed)
    scored: list[torch.Tensor] = []
    for group in groups:
        with torch.no_grad():
            scored += exact.token_logprobs(model, [completion(sequences[i]) for i in group])
    differ["logprobs, decode vs token_logprobs"] = sum(
        int((a != b).sum()) for a, b in zip(logprobs, scored, strict=True)
    )
    graded = exact.token_logprobs(model, [completion(sequences[i]) for i in groups[0][:6]])
    differ["logprobs, with gradients"] = sum(
        int((a != b.detach()).sum()) for a, b in zip(logprobs, graded, strict=False)
    )
    torch.cat(graded).mean().backward()
    report["gradients_finite"] = all(
        bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None
    )
    report["gradient_norm"] = float(
        torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None]).norm()
    )
    model.zero_grad()
    report["logprob_range"] = [
        round(float(torch.cat(logprobs).min()), 3),
        round(float(torch.cat(logprobs).max()), 3),
    ]


def controls(model: Any, sequences: list[list[int]], report: dict[str, Any]) -> None:
    """The same comparison with one plain op: it must find rows."""
    report["controls"] = {}
    sparse = hasattr(model.config, "num_experts")
    for op in ("linear", "attention", "norm"):
        exact.restore(model)
        exact.prepare(model, plain=frozenset({op}))
        crowd, _, _ = decoded(model, sequences)
        with torch.no_grad():
            report["controls"][op] = differing_rows(crowd, packed(model, sequences))
    report["controls"]["proof of attention"] = _refused_attention(model)
    if sparse:
        report["controls"]["experts"] = _halved_experts(model, sequences)
        report["controls"]["proof of experts"] = _refused_experts(model)
    exact.restore(model)
    with torch.no_grad():
        ids = sequences[3][:300]
        vanilla = torch.log_softmax(model(torch.tensor([ids], device="cuda")).logits[0].float(), -1)
        exact.prepare(model)
        own = log_softmax(exact.head(model, packed(model, [ids])[0]))
    difference = (vanilla - own).gather(-1, torch.tensor(ids, device="cuda").roll(-1)[:, None])[:-1]
    report["vanilla_mean_abs"] = float(difference.abs().mean())


def _refused_attention(model: Any) -> bool:
    try:
        prove_attention(CudaOps(frozenset({"attention"})), model.config.head_dim, 2, None)
    except Unproven:
        return True
    return False


class HalvedProducts(GroupedExperts):
    """K in two halves where there is much to do, as kernels that are chosen by size have it.

    Experts one after another by cuBLAS are no control: without split-K they have the bits of K in order.
    """

    def product(
        self,
        x: torch.Tensor,
        weight_END: torch.Tensor,
        groups: Groups,
        rows: ExpertRows,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if len(groups.order_P) < MANY_PAIRS:
            return super().product(x, weight_END, groups, rows, dtype)
        depth = x.shape[-1]
        first_PN, second_PN = (
            super(HalvedProducts, self).product(
                x[:, part], weight_END[..., part], groups, rows, torch.float32
            )
            for part in (slice(depth // 2), slice(depth // 2, depth))
        )
        return (first_PN + second_PN).to(dtype or x.dtype)


def _halved_experts(model: Any, sequences: list[list[int]]) -> int:
    """Rows that differ by it."""
    exact.restore(model)
    exact.prepare(model)
    ops = model.model.layers[0].mlp.experts.exact_ops
    ops.experts = HalvedProducts()
    crowd, _, _ = decoded(model, sequences)
    with torch.no_grad():
        found = differing_rows(crowd, packed(model, sequences))
    ops.experts = GroupedExperts()
    return found


def _refused_experts(model: Any) -> bool:
    experts = model.model.layers[0].mlp.experts
    try:
        prove_experts(HalvedProducts(), experts.gate_up_proj.detach(), model.config.num_experts_per_tok)
    except Unproven:
        return True
    return False


def main() -> int:
    options = size()
    with reported(report_name("exact_on_cuda", options.family)) as report:
        model, report["build_s"] = timed(lambda: build(options.family, small=options.small))
        if options.family == "gemma3":
            # A head with a cap is another path to logprobs; the other scripts take the one without.
            model.config.final_logit_softcapping = 30.0
        _, report["prepare_s"] = timed(lambda: exact.prepare(model))
        report["fingerprint"] = exact.numeric_fingerprint(model)
        sequences = workload(options.sequences)
        check(model, sequences, report)
        for what, count in report["differing_rows"].items():
            say(f"{count:8d} differ of {report['tokens']} tokens: {what}")
        controls(model, sequences[:16], report)
    equal = not any(report["differing_rows"].values()) and report["gradients_finite"]
    # Torch's norm may well keep its bits in the batches of this script.
    seen = all(found for op, found in report["controls"].items() if op != "norm")
    return 0 if equal and seen else 1


if __name__ == "__main__":
    sys.exit(main())

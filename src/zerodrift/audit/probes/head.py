"""Was the output head computed in less than fp32?

The size of Δ does not say it, because the body is rounded too. The reported numbers do, without any reference: logits
that left a bf16 head are bf16 numbers, and the distances between the likeliest tokens of a position are multiples of
their spacing. How much of Δ that is follows from rounding the reference's own logits in the same way.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch

from zerodrift.audit.checked_calls import generated
from zerodrift.audit.probes.result import ProbeResult, answered, found, vacuous
from zerodrift.backends.base import Backend, Capability, need
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion
from zerodrift.core.request import Request
from zerodrift.records.evidence import HeadEvidence
from zerodrift.records.verdict import Outcome, Probe
from zerodrift.stats.arrays import Floats
from zerodrift.stats.lattice import OnGrid, distances_on_grid

NAME = Probe.HEAD_PRECISION
CAUSE = "path/head-precision"
ALTERNATIVES = 20
"""The most that vLLM gives unless it was told otherwise."""
FORMATS = {"bf16": (torch.bfloat16, 7), "fp16": (torch.float16, 10)}
"""With their binary digits behind the first; coarsest first, because every bf16 number below 65,504 is an fp16 one."""
LEAST_PAIRS = 40
ON_GRID = 0.99
RESAMPLES = 400


def head_precision(engine: Backend, reference: ReferenceBackend, requests: Sequence[Request]) -> ProbeResult:
    """`requests` at temperature 1 without truncation, where raw and processed logprobs are the same number."""
    need(engine, Capability.TOP_LOGPROBS, "the distances between likely tokens show how logits were rounded")
    asked = [
        Request(
            request.prompt, msgspec.structs.replace(request.sampling, logprobs=ALTERNATIVES, ignore_eos=True)
        )
        for request in requests
    ]
    completions = [
        each for answer in generated(engine, asked) for each in answer.completions if each.top_logprobs
    ]
    logits = [_logits(reference, each) for each in completions]
    pairs = [pair for each, rows in zip(completions, logits, strict=True) for pair in _pairs(each, rows)]
    first, second, one, other = np.array(pairs, dtype=np.float64).reshape(-1, 4).T
    seen = {
        name: distances_on_grid(first, second, (one, other), digits) for name, (_, digits) in FORMATS.items()
    }
    evidence = HeadEvidence(bf16_on_grid=seen["bf16"].share, fp16_on_grid=seen["fp16"].share)
    if max(grid.judged for grid in seen.values()) < LEAST_PAIRS:
        return vacuous(NAME, f"{len(pairs)} pairs of likely tokens; {LEAST_PAIRS} are needed", evidence)
    for name, grid in seen.items():
        if grid.judged >= LEAST_PAIRS and grid.share >= ON_GRID:
            return _rounded(engine, name, grid, completions, logits)
    nearest = max(seen, key=lambda name: seen[name].share)
    message = (
        f"{seen[nearest].on} of {seen[nearest].judged} distances between likely tokens are those of {nearest} "
        f"numbers, {seen[nearest].by_chance:.1f} by chance: the head is not rounded"
    )
    return answered(NAME, Outcome.PASS, message, evidence)


def _rounded(
    engine: Backend,
    name: str,
    grid: OnGrid,
    completions: Sequence[Completion],
    logits: Sequence[torch.Tensor],
) -> ProbeResult:
    """The head is rounded; how much of Δ is that?"""
    dtype, _ = FORMATS[name]
    head, total = [], []
    for one, rows_TV in zip(completions, logits, strict=True):
        right = _sampled(rows_TV, one)
        head.append(_sampled(rows_TV.to(dtype).to(rows_TV.dtype), one) - right)
        total.append(np.array(one.logprobs) - right)
    share, interval = _share(head, total)
    mean = float(np.abs(np.concatenate(head)).mean())
    message = (
        f"logits are {name} numbers at {grid.on} of {grid.judged} distances between likely tokens "
        f"({grid.by_chance:.1f} by chance); rounding them alone moves logprobs by {mean:.2g} on average, "
        f"{share:.0%} of the variance of Δ"
    )
    cause = found(CAUSE, engine.name, NAME, message, explained=share, interval=interval)
    return answered(
        NAME, Outcome.PASS, message, HeadEvidence(on_grid=grid.share, mean=mean, share=share), causes=(cause,)
    )


def _share(head: Sequence[Floats], total: Sequence[Floats]) -> tuple[float, tuple[float, float]]:
    """Σ head² / Σ Δ², with the interval of resampled sequences."""
    squares = np.array(
        [(float((one**2).sum()), float((all_**2).sum())) for one, all_ in zip(head, total, strict=True)]
    )
    rng = np.random.default_rng(0)
    drawn = squares[rng.integers(0, len(squares), (RESAMPLES, len(squares)))].sum(axis=1)
    shares = np.clip(drawn[:, 0] / np.maximum(drawn[:, 1], 1e-300), 0.0, 1.0)
    low, high = np.quantile(shares, (0.025, 0.975))
    top, bottom = squares.sum(axis=0)
    return float(min(1.0, top / max(bottom, 1e-300))), (float(low), float(high))


def _logits(reference: ReferenceBackend, completion: Completion) -> torch.Tensor:
    (rows_TV,) = reference.teacher.logits([completion.sequence], [len(completion.prompt_token_ids)])
    return rows_TV


def _pairs(completion: Completion, rows_TV: torch.Tensor) -> list[tuple[float, float, float, float]]:
    """Neighbours among the likeliest tokens of each position: both logprobs, and the reference's logits."""
    return [
        (one.logprob, other.logprob, float(row_V[one.token_id]), float(row_V[other.token_id]))
        for entry, row_V in zip(completion.top_logprobs, rows_TV, strict=True)
        for one, other in pairwise(entry)
    ]


def _sampled(rows_TV: torch.Tensor, completion: Completion) -> Floats:
    logprobs_TV = torch.log_softmax(rows_TV.double(), dim=-1)
    found_T = logprobs_TV[torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)]
    return np.asarray(found_T.numpy(), dtype=np.float64)

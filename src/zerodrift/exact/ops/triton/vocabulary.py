"""Log-probabilities over the vocabulary, and tokens drawn from them, without a look back at the host.

A row is read in chunks of CHUNK ids. `_chunk_kernel` gives each its largest logit and its sums, `_merge_kernel` adds the
chunks in order of ids, and everything behind reads what that one kernel wrote: the trainer's log-softmax and the
engine's draw cannot disagree, however many rows or draws there are. Sums are fp64 sums of fp32 weights, and no product is
fused with a sum: a logit times 1/T is rounded here as it is where torch divides.
Shapes: R rows, V vocabulary, C chunks, D draws.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

CHUNK = 4096
"""Ids reduced by one program: 38 chunks of Qwen3's 151,936, so that 4 rows already fill a GPU."""
WARPS = 8
_NO_TOKEN = -1


class Draws(NamedTuple):
    """What to draw: one entry each."""

    rows_D: list[int]
    """Row of the logits; several where `n` samples start from one prompt."""
    seeds_D: list[int]
    sample_indices_D: list[int]
    positions_D: list[int]
    """Output tokens that were drawn before."""
    forced_D: list[int | None]
    """Take this token, and say how likely it was."""
    greedy_D: list[bool]


class Drawn(NamedTuple):
    """What was drawn, on the host."""

    tokens_D: list[int]
    logprobs_D: list[float]
    entropies_D: list[float]
    """Of the row's distribution, in nats."""
    finite_D: list[bool]
    """Whether all logits of the row are; if not, the rest says nothing."""


class RowSums(NamedTuple):
    """Of every row: what its log-probabilities and draws are made of."""

    highest_RC: torch.Tensor
    up_to_RC: torch.Tensor
    """Weights of all ids up to the end of each chunk, relative to the row's largest."""
    row_R4: torch.Tensor
    """Largest logit, log of the sum, entropy, and how many logits are not finite; fp64."""


@triton.jit
def _mixed(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(seed, sample_index, position):
    """`zerodrift.sampler.noise.uniform`, the same 53 bits."""
    state = _mixed(seed + 0x9E3779B97F4A7C15 * (sample_index + 1))
    state = _mixed(state + 0x9E3779B97F4A7C15 * (position + 1))
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _chunk_kernel(
    logits_ptr,
    scale_ptr,
    highest_ptr,
    sums_ptr,
    SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * SIZE + column, mask=column < SIZE, other=float("-inf"))
    x = x * tl.load(scale_ptr + row)
    highest = tl.max(x, 0)
    away = x - tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(away)
    broken = (x - x != 0.0) & (column < SIZE)
    place = row * CHUNKS + chunk
    tl.store(highest_ptr + place, highest)
    tl.store(sums_ptr + place * 3, tl.sum(weight.to(tl.float64), 0))
    tl.store(sums_ptr + place * 3 + 1, tl.sum(tl.where(weight > 0, weight * away, 0.0).to(tl.float64), 0))
    tl.store(sums_ptr + place * 3 + 2, tl.sum(broken.to(tl.float64), 0))


@triton.jit
def _merge_kernel(highest_ptr, sums_ptr, up_to_ptr, row_ptr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < CHUNKS
    place = row * CHUNKS + chunk
    highest_C = tl.load(highest_ptr + place, mask=inside, other=float("-inf"))
    weight = tl.load(sums_ptr + place * 3, mask=inside, other=0.0)
    weighted = tl.load(sums_ptr + place * 3 + 1, mask=inside, other=0.0)
    broken = tl.sum(tl.load(sums_ptr + place * 3 + 2, mask=inside, other=0.0), 0)
    highest = tl.max(highest_C, 0)
    away = (highest_C - highest).to(tl.float64)
    relative = tl.exp(away)
    up_to = tl.cumsum(weight * relative, 0)
    tl.store(up_to_ptr + place, up_to, mask=inside)
    total = tl.sum(tl.where(chunk == CHUNKS - 1, up_to, 0.0), 0)
    log_total = tl.log(total)
    # A chunk without any weight has no largest logit, and 0 · inf would be NaN.
    spread = tl.sum(tl.where(weight > 0, relative * (weighted + weight * away), 0.0), 0)
    tl.store(row_ptr + row * 4, highest.to(tl.float64))
    tl.store(row_ptr + row * 4 + 1, log_total)
    tl.store(row_ptr + row * 4 + 2, log_total - spread / total)
    tl.store(row_ptr + row * 4 + 3, broken)


@triton.jit
def _log_softmax_kernel(logits_ptr, row_ptr, out_ptr, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    highest = tl.load(row_ptr + row * 4).to(tl.float32)
    log_total = tl.load(row_ptr + row * 4 + 1)
    x = tl.load(logits_ptr + row * SIZE + column, mask=column < SIZE, other=0.0)
    tl.store(
        out_ptr + row * SIZE + column,
        ((x - highest).to(tl.float64) - log_total).to(tl.float32),
        mask=column < SIZE,
    )


@triton.jit
def _choose_kernel(
    logits_ptr,
    scale_ptr,
    highest_ptr,
    up_to_ptr,
    row_ptr,
    draws_ptr,
    out_ptr,
    count,
    SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    draw = tl.program_id(0)
    row = tl.load(draws_ptr + draw)
    position = tl.load(draws_ptr + 3 * count + draw).to(tl.uint64)
    forced = tl.load(draws_ptr + 4 * count + draw)
    greedy = tl.load(draws_ptr + 5 * count + draw)
    seed = tl.load(draws_ptr + count + draw).to(tl.uint64)
    sample_index = tl.load(draws_ptr + 2 * count + draw).to(tl.uint64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < CHUNKS
    highest_C = tl.load(highest_ptr + row * CHUNKS + chunk, mask=inside, other=float("-inf"))
    up_to = tl.load(up_to_ptr + row * CHUNKS + chunk, mask=inside, other=0.0)
    highest = tl.load(row_ptr + row * 4).to(tl.float32)
    log_total = tl.load(row_ptr + row * 4 + 1)
    scale = tl.load(scale_ptr + row)
    target = _uniform(seed, sample_index, position) * tl.sum(tl.where(chunk == CHUNKS - 1, up_to, 0.0), 0)
    found = tl.where(greedy != 0, highest_C == highest, up_to > target) & inside
    where = tl.min(tl.where(found, chunk, CHUNKS - 1), 0)
    before = tl.sum(tl.where(chunk == where - 1, up_to, 0.0), 0)
    own = tl.max(tl.where(chunk == where, highest_C, float("-inf")), 0)
    column = where * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * SIZE + column, mask=column < SIZE, other=float("-inf")) * scale
    weight = tl.exp(x - own)
    reached = before + tl.cumsum(weight.to(tl.float64) * tl.exp((own - highest).to(tl.float64)), 0)
    hit = tl.where(greedy != 0, x == highest, (reached > target) & (weight > 0))
    first = tl.min(tl.where(hit, column, SIZE), 0)
    # The scan may end an ulp below the chunk's sum: then it is the chunk's last id that has any weight.
    last = tl.max(tl.where(weight > 0, column, 0), 0)
    token = tl.where(forced >= 0, forced, tl.where(first < SIZE, first, last).to(tl.int64))
    logit = tl.load(logits_ptr + row * SIZE + token) * scale
    tl.store(out_ptr + draw, token.to(tl.float64))
    tl.store(
        out_ptr + count + draw, ((logit - highest).to(tl.float64) - log_total).to(tl.float32).to(tl.float64)
    )
    tl.store(out_ptr + 2 * count + draw, tl.load(row_ptr + row * 4 + 2))
    tl.store(out_ptr + 3 * count + draw, tl.load(row_ptr + row * 4 + 3))


def log_softmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """In fp32; -inf stays -inf."""
    logits_RV = logits_RV.float().contiguous()
    sums = row_sums(logits_RV, torch.ones(len(logits_RV), device=logits_RV.device))
    out_RV = torch.empty_like(logits_RV)
    if len(logits_RV):
        _log_softmax_kernel[(len(logits_RV), sums.highest_RC.shape[1])](
            logits_RV,
            sums.row_R4,
            out_RV,
            logits_RV.shape[1],
            CHUNK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return out_RV


def draw(logits_RV: torch.Tensor, temperatures_R: list[float], draws: Draws) -> Drawn:
    """Tokens by inversion, each with its log-probability under its row's temperature; one copy up, one back."""
    device = logits_RV.device
    # As torch divides by a number on a GPU: it multiplies with the fp32 reciprocal.
    scale_R = torch.tensor(temperatures_R, dtype=torch.float32).reciprocal_().to(device, non_blocking=True)
    forced = [_NO_TOKEN if token is None else token for token in draws.forced_D]
    asked_6D = torch.tensor([*draws[:4], forced, [int(each) for each in draws.greedy_D]]).to(device)
    out_4D = torch.empty(4, len(draws.rows_D), dtype=torch.float64, device=device)
    draw_into(logits_RV, scale_R, asked_6D, out_4D)
    tokens, logprobs, entropies, broken = out_4D.tolist()
    return Drawn([int(token) for token in tokens], logprobs, entropies, [each == 0 for each in broken])


def draw_into(
    logits_RV: torch.Tensor, scale_R: torch.Tensor, asked_6D: torch.Tensor, out_4D: torch.Tensor
) -> None:
    """As above without the host: logits times `scale`, fields of `Draws` in order (no token is -1), and into `out` token,
    logprob, entropy and how many logits of the row are not finite."""
    sums = row_sums(logits_RV, scale_R)
    count, chunks = asked_6D.shape[1], sums.highest_RC.shape[1]
    _choose_kernel[(count,)](
        logits_RV,
        scale_R,
        sums.highest_RC,
        sums.up_to_RC,
        sums.row_R4,
        asked_6D,
        out_4D,
        count,
        logits_RV.shape[1],
        chunks,
        CHUNK,
        triton.next_power_of_2(chunks),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def row_sums(logits_RV: torch.Tensor, scale_R: torch.Tensor) -> RowSums:
    """Of logits times `scale`, which all else is made of."""
    rows, size = logits_RV.shape
    chunks = triton.cdiv(size, CHUNK)
    highest_RC = torch.empty(rows, chunks, device=logits_RV.device)
    sums_RC3 = torch.empty(rows, chunks, 3, dtype=torch.float64, device=logits_RV.device)
    up_to_RC = torch.empty(rows, chunks, dtype=torch.float64, device=logits_RV.device)
    row_R4 = torch.empty(rows, 4, dtype=torch.float64, device=logits_RV.device)
    if rows:
        _chunk_kernel[(rows, chunks)](
            logits_RV,
            scale_R,
            highest_RC,
            sums_RC3,
            size,
            chunks,
            CHUNK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
        _merge_kernel[(rows,)](
            highest_RC,
            sums_RC3,
            up_to_RC,
            row_R4,
            chunks,
            triton.next_power_of_2(chunks),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return RowSums(highest_RC, up_to_RC, row_R4)

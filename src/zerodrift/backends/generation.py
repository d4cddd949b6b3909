"""Sampling from vanilla `transformers`, a left-padded batch at a time.

The logprob reported for a token comes from the forward that sampled it, never from a second pass. Noise depends on
(seed, sample index, position), so a sample does not depend on its neighbours in the batch. Shapes: B rows, V
vocabulary, L positions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch
from torch.nn.utils.rnn import pad_sequence

from zerodrift.core.completion import FinishReason
from zerodrift.core.errors import InvalidPrompt, NonFinite
from zerodrift.core.request import Request, SamplingParams
from zerodrift.models.family.abilities import cache_in, has_kv_cache, masks_padding
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import draw_seed, uniform
from zerodrift.sampler.processing import TokenHistory, processed_logprobs

Alternatives = list[tuple[int, float]]


@dataclass
class Sampled:
    """One sample while it grows."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    """With the seed that is used."""
    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    raw_alternatives: list[Alternatives] = field(default_factory=list)
    finished: FinishReason | None = None


def sample(
    model: Any,
    requests: Sequence[Request],
    *,
    eos_ids: Sequence[int],
    max_len: int,
    batch: int,
    decode: Callable[[list[int]], str],
) -> list[Sampled]:
    """All samples of all requests, in request order, then sample order."""
    rows = [row for request in requests for row in _rows(request, max_len)]
    for group in _batches(model, rows, batch):
        _run(model, group, eos_ids, decode)
    return rows


def _batches(model: Any, rows: Sequence[Sampled], batch: int) -> Iterator[Sequence[Sampled]]:
    """In the order given; where padding is read, prompts of one length together."""
    if masks_padding(model):
        groups = [list(rows)]
    else:
        lengths = sorted({len(row.prompt) for row in rows})
        groups = [[row for row in rows if len(row.prompt) == length] for length in lengths]
    for group in groups:
        for begin in range(0, len(group), batch):
            yield group[begin : begin + batch]


def _rows(request: Request, max_len: int) -> list[Sampled]:
    prompt, sampling = request.prompt.token_ids, request.sampling
    if len(prompt) + sampling.max_tokens > max_len:
        raise InvalidPrompt(
            f"{len(prompt)} prompt tokens and max_tokens={sampling.max_tokens} exceed the context of {max_len}; "
            "shorten one of the two"
        )
    if sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=draw_seed())
    return [Sampled(prompt, sampling, index) for index in range(sampling.n)]


@torch.no_grad()
def _run(
    model: Any, rows: Sequence[Sampled], eos_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> None:
    ids_BL, mask_BL = padded([row.prompt for row in rows], "left")
    keeps = has_kv_cache(model)
    cache: dict[str, Any] = {"past_key_values": None, "use_cache": True} if keeps else {"use_cache": False}
    while True:
        positions_BL = (mask_BL.cumsum(dim=-1) - 1).clamp(min=0)[:, -ids_BL.shape[1] :]
        output = model(ids_BL, attention_mask=mask_BL, position_ids=positions_BL, logits_to_keep=1, **cache)
        if keeps:
            cache["past_key_values"] = cache_in(output)
        logits_BV = output.logits[:, -1]
        for index, row in enumerate(rows):
            if row.finished is None:
                _append(row, logits_BV[index : index + 1], eos_ids)
                row.finished = _ended(row, eos_ids, decode)
        if all(row.finished is not None for row in rows):
            return
        new_B1 = torch.tensor([[row.token_ids[-1]] for row in rows])
        # What keeps nothing reads everything again.
        ids_BL = new_B1 if keeps else torch.cat([ids_BL, new_B1], dim=-1)
        mask_BL = torch.cat([mask_BL, torch.ones(len(rows), 1, dtype=torch.long)], dim=-1)


def padded(
    sequences: Sequence[Sequence[int]], side: Literal["left", "right"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of mixed length as one tensor, and where they are."""
    ids_BL, mask_BL = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side=side)
        for rows in (list(map(list, sequences)), [[1] * len(ids) for ids in sequences])
    )
    return ids_BL, mask_BL


def _append(row: Sampled, logits_1V: torch.Tensor, eos_ids: Sequence[int]) -> None:
    logits_1V = logits_1V if logits_1V.dtype is torch.float64 else logits_1V.float()
    if not bool(torch.isfinite(logits_1V).all()):
        raise NonFinite(
            f"the model gives non-finite logits at output position {len(row.token_ids)}; "
            "its weights are corrupt: check the checkpoint for NaN"
        )
    params = row.sampling
    raw_V = torch.log_softmax(logits_1V, dim=-1)[0]
    logprobs_V = processed_logprobs(logits_1V, params, [TokenHistory(row.prompt, row.token_ids)], eos_ids)[0]
    if params.greedy:
        token = int(logprobs_V.argmax())
    else:
        assert params.seed is not None, "rows are made with a seed"
        token = choose(logprobs_V, uniform(params.seed, row.sample_index, len(row.token_ids)))
    row.token_ids.append(token)
    row.logprobs.append(float(logprobs_V[token]))
    row.raw_logprobs.append(float(raw_V[token]))
    if params.logprobs:
        row.alternatives.append(_top(logprobs_V, params.logprobs))
        row.raw_alternatives.append(_top(raw_V, params.logprobs))


def _top(logprobs_V: torch.Tensor, count: int) -> Alternatives:
    """The `count` likeliest tokens; excluded ones have no logprob and are left out."""
    best = logprobs_V.topk(min(count, len(logprobs_V)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(token, value) for token, value in pairs if value > -torch.inf]


def _ended(row: Sampled, eos_ids: Sequence[int], decode: Callable[[list[int]], str]) -> FinishReason | None:
    params, token = row.sampling, row.token_ids[-1]
    if len(row.token_ids) >= params.min_tokens:
        if token in params.stop_token_ids or (token in eos_ids and not params.ignore_eos):
            return FinishReason.STOP
        if params.stop and any(stop in decode(row.token_ids) for stop in params.stop):
            return FinishReason.STOP
    return FinishReason.LENGTH if len(row.token_ids) >= params.max_tokens else None

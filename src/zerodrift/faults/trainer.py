"""Faults of the trainer: its own forward gives other numbers than the model would, sequence by sequence.

Each is a `Scorer` over a transformers causal LM, which is shared and not changed. Shapes: B rows, L positions, T
tokens, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zerodrift.core.errors import InvalidValue
from zerodrift.faults.wrapper import Plant

Forward = Callable[[Any, Sequence[Sequence[int]]], Iterator[torch.Tensor]]
"""(model, sequences) to the logits [T, V] of each sequence, one row per token."""

MICRO_BATCH = 4


class FaultyScorer:
    """Scores with a forward that is wrong."""

    def __init__(self, model: Any, forward: Forward) -> None:
        self._model = model
        self._forward = forward

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprobs of tokens 1… of each sequence."""
        scores = []
        for ids, logits_TV in zip(sequences, self._forward(self._model, sequences), strict=True):
            wide_TV = logits_TV if logits_TV.dtype is torch.float64 else logits_TV.float()
            logprobs_TV = torch.log_softmax(wide_TV, dim=-1)[:-1]
            scores.append(logprobs_TV[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist())
        return scores


def _packed(model: Any, sequences: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """Sequences one after the other in a row. Positions restart, and the mask of ones lets all see all before."""
    for row in _rows(sequences, model.config.max_position_embeddings):
        ids_1L = torch.tensor([[token for ids in row for token in ids]])
        positions_1L = torch.tensor([[position for ids in row for position in range(len(ids))]])
        # Without any mask transformers would see from the positions where sequences begin, and be right.
        output = model(
            ids_1L, attention_mask=torch.ones_like(ids_1L), position_ids=positions_1L, use_cache=False
        )
        yield from output.logits[0].split([len(ids) for ids in row])


def _rows(sequences: Sequence[Sequence[int]], longest: int) -> Iterator[list[Sequence[int]]]:
    row: list[Sequence[int]] = []
    for ids in sequences:
        if row and sum(map(len, row)) + len(ids) > longest:
            yield row
            row = []
        row.append(ids)
    if row:
        yield row


def _autocast(model: Any, sequences: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    if model.dtype is torch.float64:
        raise InvalidValue("autocast leaves a float64 model as it is; give one in float32")
    for ids in sequences:
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            logits_TV = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        yield logits_TV


def _in_bf16(model: Any, sequences: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """Weights in bf16, and rotary tables as they are."""
    narrow = copy.deepcopy(model)
    for parameter in narrow.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for ids in sequences:
        yield narrow(torch.tensor([list(ids)]), use_cache=False).logits[0]


def _left_padded(model: Any, sequences: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """Padding without a mask: shorter sequences look back on it."""
    for begin in range(0, len(sequences), MICRO_BATCH):
        group = sequences[begin : begin + MICRO_BATCH]
        longest = max(map(len, group))
        ids_BL = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in group])
        logits_BLV = model(ids_BL, use_cache=False).logits
        for ids, logits_LV in zip(group, logits_BLV, strict=True):
            yield logits_LV[longest - len(ids) :]


def _positioned(position: Callable[[int], int]) -> Forward:
    """Token i at `position(i)`. A constant shift would not show: rotary attention sees distances only."""

    def forward(model: Any, sequences: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        for ids in sequences:
            ids_1L = torch.tensor([list(ids)])
            positions_1L = torch.tensor([[position(index) for index in range(len(ids))]])
            mask_1L = torch.ones_like(ids_1L)
            yield model(ids_1L, attention_mask=mask_1L, position_ids=positions_1L, use_cache=False).logits[0]

    return forward


def _plant(forward: Forward) -> Callable[[Any], FaultyScorer]:
    return lambda model: FaultyScorer(model, forward)


TRAINER_FAULTS: Mapping[str, Plant] = {
    "trainer/packing:leak": _plant(_packed),
    "trainer/autocast:bf16": _plant(_autocast),
    "trainer/precision:bf16-weights": _plant(_in_bf16),
    "trainer/micro-batch:left-padding": _plant(_left_padded),
    "trainer/positions:gap": _plant(_positioned(lambda index: index + 16 * (index >= 8))),
    "trainer/positions:restart": _plant(_positioned(lambda index: index % 16)),
}

"""Bugs of the trainer's own forward: the engine is right."""

from collections.abc import Sequence
from typing import Any

import torch

from history.bug import reenacted

WINDOW = 3
"""A convolution over four tokens looks back on three."""


class LeakingWindow:
    """Samples are packed into one row, and the first tokens of each look back on the last three of the one before."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scores, tail = [], []
        for ids in sequences:
            row = torch.tensor([[*tail, *ids]])
            # Numbered as packers do; the mask of ones is what lets the tail through.
            positions = torch.tensor([[*range(len(tail)), *range(len(ids))]])
            logits_LV = self._model(
                row, attention_mask=torch.ones_like(row), position_ids=positions, use_cache=False
            ).logits[0, len(tail) :]
            logprobs_LV = torch.log_softmax(logits_LV.float(), dim=-1)
            scores.append(logprobs_LV[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist())
            tail = list(ids[-WINDOW:])
        return scores


TRAINER = (reenacted("Automodel#2147", LeakingWindow),)

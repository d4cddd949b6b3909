"""A way of computing logits, and the cause it stands for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zerodrift.records.evidence import LocatedEvidence

Alone = Callable[[Any, Sequence[int], int, int], torch.Tensor]
"""(changed model, sequence, length of its prompt, first token to predict) to rows of logits."""


class Variant(NamedTuple):
    """One of them."""

    cause: str
    message: str
    build: Callable[[Any], Any]
    """Model to changed model; run only if the hypothesis is tried."""
    positions: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Right positions to those that were used; None: they are right."""
    alone: Alone | None = None
    """How a sequence is computed by itself, where it matters which of its tokens were the prompt."""
    located: LocatedEvidence | None = None
    """Where in the model it is, for what has no cause in the vocabulary."""

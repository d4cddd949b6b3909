"""Teach a built-in model to add single digits: "3+4=" is continued by "7". A skill that rewards can be given for.

All hundred sums are trained on, since remembering them is the point. The same machine, thread count and torch give
the same weights; other machines give weights that differ by rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

_IGNORED = -100
# 80 steps take 12 s on one core and answer at least 99 of the 100 sums; 30 steps answer 57 of them.
_STEPS = 80
_BATCH = 50
_LEARNING_RATE = 1e-3


def problems() -> list[tuple[str, str]]:
    """Every sum of two digits, as (question, answer)."""
    return [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]


def warm_up(
    model: PreTrainedModel,
    tokenizer: Any,
    steps: int = _STEPS,
    lessons: Sequence[tuple[str, str]] | None = None,
) -> list[float]:
    """Train `model` in place; returns the loss of each step, in nats per answer token (EOS included).

    `lessons` are (question, answer), in place of the hundred sums.
    """
    ids_NT, labels_NT = _examples(tokenizer, problems() if lessons is None else lessons)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    losses = []
    for step in range(steps):
        rows = torch.randperm(len(ids_NT), generator=generator)[:_BATCH]
        logits_BTV = model(ids_NT[rows]).logits[:, :-1]
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), labels_NT[rows, 1:].flatten())
        # To zero along a line: the last steps settle what the first ones shook.
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    model.zero_grad()
    return losses


def _examples(tokenizer: Any, lessons: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, padded on the right with EOS, where no label lies and nothing looks back from."""
    rows = []
    for question, answer in lessons:
        prompt, full = (
            tokenizer.encode(question),
            [*tokenizer.encode(question + answer), tokenizer.eos_token_id],
        )
        rows.append((full, [_IGNORED] * len(prompt) + full[len(prompt) :]))
    length = max(len(ids) for ids, _ in rows)
    ids_NT = torch.tensor([ids + [tokenizer.eos_token_id] * (length - len(ids)) for ids, _ in rows])
    labels_NT = torch.tensor([labels + [_IGNORED] * (length - len(labels)) for _, labels in rows])
    return ids_NT, labels_NT

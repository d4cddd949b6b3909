"""How logprobs follow the update of every row of every tensor: the derivative by the share of it that is there.

In reverse mode, with the gradients that training has: a token costs one backward, however many tensors there are. The
effects of 272 tensors, one forward each, would cost 16 times as much for the 64 tokens of an update, and know no rows.
Shapes: N tokens, R rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from zerodrift.core.completion import Completion
from zerodrift.stats.arrays import Floats


def rows_of(parameter: torch.Tensor) -> int:
    """A vector is one row: nobody sends half a norm."""
    return int(parameter.shape[0]) if parameter.dim() > 1 else 1


def by_row(
    model: Any, before: Mapping[str, torch.Tensor], completions: Sequence[Completion]
) -> dict[str, Floats]:
    """For every tensor of `model`, [N, R]: what one more update of each row, from `before`, would add to each logprob."""
    total = sum(len(completion.token_ids) for completion in completions)
    found: dict[str, Floats] = {
        name: np.zeros((total, rows_of(parameter)), dtype=np.float32)
        for name, parameter in model.named_parameters()
    }
    place = 0
    with _recording(model, before, found) as record_at:
        for completion in completions:
            for logprob in _logprobs(model, completion):
                record_at(place)
                # The graph of the sequence is needed by its other tokens; it goes with the last of them.
                logprob.backward(retain_graph=True)
                place += 1
    return found


def _logprobs(model: Any, completion: Completion) -> torch.Tensor:
    ids_1L = torch.tensor([completion.sequence], device=model.device)
    first, count = len(completion.prompt_token_ids), len(completion.token_ids)
    rows_T = torch.arange(first - 1, first - 1 + count)
    logits_TV = model(ids_1L, use_cache=False, logits_to_keep=rows_T).logits[0]
    wide = logits_TV if logits_TV.dtype is torch.float64 else logits_TV.float()
    tokens_T = torch.tensor(completion.token_ids, device=wide.device)
    logprobs: torch.Tensor = wide.log_softmax(dim=-1).gather(-1, tokens_T[:, None])[:, 0]
    return logprobs


@contextmanager
def _recording(model: Any, before: Mapping[str, torch.Tensor], found: Mapping[str, Floats]) -> Iterator[Any]:
    """Each gradient is reduced as it comes and let go, so that there is never more than one; the model is left as it was."""
    token = [0]

    def reduce(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "called where a gradient has come"
        change = parameter.detach() - before[name].to(parameter)
        moved = parameter.grad * change
        found[name][token[0]] = moved.reshape(rows_of(parameter), -1).sum(dim=1).float().cpu().numpy()
        parameter.grad = None

    named = list(model.named_parameters())
    wanted = [parameter.requires_grad for _, parameter in named]
    hooks = []
    try:
        for name, parameter in named:
            parameter.requires_grad_(True)  # noqa: FBT003 - torch's own
            hooks.append(parameter.register_post_accumulate_grad_hook(partial(reduce, name)))
        with torch.enable_grad():
            yield partial(token.__setitem__, 0)
    finally:
        for hook in hooks:
            hook.remove()
        for (_, parameter), before_it in zip(named, wanted, strict=True):
            parameter.requires_grad_(before_it)

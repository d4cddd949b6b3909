"""Canary logprobs by the trainer's own model, whole and by the parts of an update.

In fp32 arithmetic whatever the weights are in: in bf16 the trainer's own rounding is most of what it would predict. A real
vLLM that had taken an update of 1e-6 whole had a slope of 0.06 on such predictions.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerodrift.stats.arrays import Floats
from zerodrift.sync.canary import Canary
from zerodrift.sync.shards import cuts, shard
from zerodrift.weights.digest import checkpoint_state

LOGIT_BYTES = 2**28
"""Logits of one forward, at most: a batch of 64-token canaries with a vocabulary of 151,936 has 6."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def part_of(name: str) -> str:
    """`layer 3`, or the module that owns a tensor outside the layers, of a tensor in a checkpoint."""
    if (layer := _LAYER.search(name)) is not None:
        return f"layer {layer[1]}"
    return name.removesuffix(".weight").removesuffix(".bias").rsplit(".", maxsplit=1)[-1]


@torch.no_grad()
def trainer_scores(model: Any, canary: Canary) -> Floats:
    """Of the weights of `model` as they are: those that are sent to engines, in the dtype in which they are sent."""
    model = in_fp32(model)
    rows: dict[int, list[float]] = {}
    training = model.training
    model.eval()
    try:
        for numbers in _batches(canary, 4 * int(model.config.vocab_size)):
            ids_BL = torch.tensor([canary.sequences[number] for number in numbers], device=model.device)
            logits_BLV = model(ids_BL, use_cache=False).logits[:, :-1].float()
            ids_BL1 = ids_BL[:, 1:, None].to(logits_BLV.device)
            scores_BL = logits_BLV.log_softmax(dim=-1).gather(-1, ids_BL1)[..., 0]
            rows.update(zip(numbers, scores_BL.double().tolist(), strict=True))
    finally:
        model.train(training)
    return canary.flat("the trainer", [rows[number] for number in range(len(canary.sequences))])


def in_fp32(model: Any) -> Any:
    """`model`, or a copy of it with the same numbers in fp32."""
    if next(model.parameters()).dtype in (torch.float32, torch.float64):
        return model
    return copy.deepcopy(model).float()


def _batches(canary: Canary, row_bytes: int) -> Iterator[list[int]]:
    """Sequences of one length together: no padding, and so nothing that a wrong mask could do."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, ids in enumerate(canary.sequences):
        by_length[len(ids)].append(number)
    for length, numbers in by_length.items():
        size = max(1, LOGIT_BYTES // (length * row_bytes))
        yield from (numbers[begin : begin + size] for begin in range(0, len(numbers), size))


def part_scores(
    model: Any, old: Mapping[str, torch.Tensor], canary: Canary, whole: Floats
) -> dict[str, Floats]:
    """By layer or module, how much of the change of each logprob is its own: what is lost where it did not arrive.

    One forward for each. `old` has the tensors from before the update, which are put into the model for a moment.
    """
    model = in_fp32(model)
    parts: dict[str, list[PutBack]] = defaultdict(list)
    for name, tensor in checkpoint_state(model).items():
        if not torch.equal(tensor, old[name].to(tensor)):
            parts[part_of(name)].append(PutBack(tensor, old[name]))
    return {part: whole - _without(model, pairs, canary) for part, pairs in parts.items()}


def rank_scores(
    model: Any, old: Mapping[str, torch.Tensor], canary: Canary, whole: Floats, ranks: int
) -> dict[str, Floats]:
    """By rank of an engine that cuts its tensors among `ranks`, the same: one forward for each."""
    model = in_fp32(model)
    state, cut = checkpoint_state(model), cuts(model)
    pairs = {
        rank: [
            PutBack(*(shard(tensor, cut[name], rank, ranks) for tensor in (state[name], old[name])))
            for name in state.keys() & cut.keys()
        ]
        for rank in (range(ranks) if ranks > 1 and cut else ())
    }
    return {f"rank {rank} of {ranks}": whole - _without(model, pairs[rank], canary) for rank in pairs}


class PutBack(NamedTuple):
    """A tensor of the model, or a view of a piece of it, and what it was before the update."""

    new: torch.Tensor
    old: torch.Tensor


@torch.no_grad()
def _without(model: Any, pairs: Sequence[PutBack], canary: Canary) -> Floats:
    """What `model` says while these are as they were."""
    kept = [pair.new.clone() for pair in pairs]
    try:
        for new, old in pairs:
            new.copy_(old)
        return trainer_scores(model, canary)
    finally:
        for (new, _), value in zip(pairs, kept, strict=True):
            new.copy_(value)

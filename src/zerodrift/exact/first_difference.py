"""Which op is the first to give a sequence other bits by another path: where to look when a theorem fails.

Every module's inputs and outputs are watched by hooks while the sequence is computed whole and alone, and then in pages
by a schedule. Of each row only a 64-bit sum is kept. A module whose inputs agree and whose output does not is the
culprit; where its input is the first to differ, it is the op in front of it that is no module, such as attention.
Shapes: T tokens of a forward, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch

from zerodrift.exact.logprobs import head
from zerodrift.exact.normalisation import log_softmax
from zerodrift.exact.paged import PagedKV, forward_paged
from zerodrift.exact.verification import Schedule, alone, batch_of
from zerodrift.models.family.parts import ModelParts

HEAD_ROWS = 64
"""Rows whose logits are held at once."""


class Difference(NamedTuple):
    """The first op, in order of execution, whose rows differ."""

    module: str
    """Path in the model; what comes after the head is called `log_softmax`."""
    op: str
    """The module's class, or for what lies in front of a module: `attention`, or `before` and its class."""
    position: int
    """The first token with other bits."""
    rows: int
    """How many tokens have other bits here."""

    def __str__(self) -> str:
        return f"{self.op} at {self.module}: {self.rows} rows differ, the first at position {self.position}"


class _Place(NamedTuple):
    module: str
    op: str
    part: int
    """Which of several tensors, or which call of a module that a forward calls more than once."""


_Seen = dict[_Place, torch.Tensor]
"""For each place, in order of execution, a sum of the bits of every row."""


@torch.no_grad()
def first_difference(
    model: Any, sequence: Sequence[int], schedule: Schedule, beside: Sequence[Sequence[int]] = ()
) -> Difference | None:
    """Between `sequence` alone and whole, and in pages by `schedule`, with `beside` for company; None if no bit differs."""
    whole: _Seen = {}
    with _watched(model, whole):
        _to_logprobs(model, alone(model, [sequence])[0], whole)
    stepwise = _stepwise(model, [sequence, *beside], schedule)
    for place, expected_T in whole.items():
        found_T = stepwise.get(place)
        # A module that sees some of the tokens only, such as one expert, has no row for each.
        if found_T is None or len(found_T) != len(expected_T):
            continue
        differing = (found_T != expected_T).nonzero().flatten()
        if len(differing):
            return Difference(place.module, place.op, int(differing[0]), len(differing))
    return None


def _stepwise(model: Any, sequences: Sequence[Sequence[int]], schedule: Schedule) -> _Seen:
    """What the tokens of the first sequence give at each place, step by step."""
    lengths = [len(each) for each in sequences]
    tables, blocks = schedule.tables(lengths)
    kv = PagedKV(model, blocks, schedule.block_size)
    parts: dict[_Place, list[torch.Tensor]] = {}
    for step in schedule.steps(lengths):
        seen: _Seen = {}
        with _watched(model, seen):
            batch = batch_of(model, sequences, tables, schedule.block_size, step)
            _to_logprobs(model, forward_paged(model, batch, kv), seen)
        begins = dict(zip((index for index, _, _ in step), batch.bounds, strict=False))
        for index, begin, end in step:
            if index == 0:
                for place, sums_T in seen.items():
                    if len(sums_T) == len(batch.token_ids_T):
                        parts.setdefault(place, []).append(sums_T[begins[0] : begins[0] + end - begin])
    return {place: torch.cat(found) for place, found in parts.items()}


def _to_logprobs(model: Any, hidden_TH: torch.Tensor, seen: _Seen) -> None:
    """The head is not called as a module, and rows of V are not kept: both are summed up here."""
    sums: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for part_TH in torch.split(hidden_TH, HEAD_ROWS):
        logits_TV = head(model, part_TH)
        sums[0].append(_bits(logits_TV))
        sums[1].append(_bits(log_softmax(logits_TV)))
    parts = ModelParts(model)
    seen[_Place(str(parts.family.head), type(parts.head).__name__, 0)] = torch.cat(sums[0])
    seen[_Place("log_softmax", "log_softmax", 0)] = torch.cat(sums[1])


@contextmanager
def _watched(model: Any, seen: _Seen) -> Iterator[None]:
    """Hooks on all modules below the decoder, taken off again whatever happens."""
    handles, parts = [], ModelParts(model)
    behind_attention = _output_projections(parts)
    for path, module in model.named_modules():
        if path and module is not parts.head:
            in_front = "attention" if module in behind_attention else f"before {type(module).__name__}"
            before, after = _hooks(path, module, in_front, seen)
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _output_projections(parts: ModelParts) -> set[Any]:
    """The modules right behind attention, which is none itself."""
    places = parts.family.attention
    return (
        set()
        if places is None
        else {each.get_submodule(places.projections["o"]) for each in parts.attentions()}
    )


def _hooks(
    path: str, module: Any, in_front: str, seen: _Seen
) -> tuple[Callable[..., None], Callable[..., None]]:
    kind, parts = type(module).__name__, count()

    def note(op: str, value: Any) -> None:
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dim() > 1:
                rows = tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor
                seen[_Place(path, op, next(parts))] = _bits(rows)

    return (
        lambda _, arguments: note(in_front, arguments),
        lambda _, __, output: note(kind, output),
    )


def _bits(rows_T: torch.Tensor) -> torch.Tensor:
    """Each row's words, added up with odd factors: one word that differs always shows."""
    words = rows_T.detach().reshape(len(rows_T), -1).contiguous()
    words_TN = words.view(torch.int32 if words.element_size() == 4 else torch.int16).to(torch.int64)
    factors_N = torch.arange(words_TN.shape[1], device=words_TN.device) * 0x5851F42D4C957F2D | 1
    return (words_TN * factors_N).sum(-1)

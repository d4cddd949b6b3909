"""Two models that differ by a known update, and any mixture of them that an update gone wrong may have left.

An accelerator has the numbers of one of them, and the host those of the other: an 8B in fp32 is 31 GiB, and a second one
beside it and beside the engine is what a card of 80 has no room for. They change places in some seconds.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from zerodrift.audit.update.derivatives import by_row, rows_of
from zerodrift.audit.update.parts import Part, Slopes
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.completion import Completion
from zerodrift.models.copies import sharing
from zerodrift.models.family.registry import family_of
from zerodrift.stats.arrays import Floats


class Move(NamedTuple):
    """A part of the update, and what is there of it beyond the one time that it should be."""

    part: Part
    by: float
    """−1 where it did not arrive, 1 where it came twice."""


def beside(model: Any) -> Any:
    """A copy of `model` whose parameters are on the host, and all else where the model is."""
    host = {
        id(each): torch.nn.Parameter(each.detach().to("cpu", copy=True), requires_grad=each.requires_grad)
        for each in model.parameters()
    }
    return copy.deepcopy(model, dict(host))


class UpdatedWeights:
    """Two models, old and new, that differ by a known amount in every tensor; one of them is ready to compute."""

    def __init__(self, old: Any, new: Any) -> None:
        """Of both models the numbers stay as they are; `old` is where both are to compute."""
        self.old, self.new = old, new
        self.family = family_of(new)
        self.device = next(old.parameters()).device

    def bring(self, model: Any) -> None:
        """Make `model`, old or new, ready to compute, in the place of the other where there is one place."""
        leaving = self.old if model is self.new else self.new
        # All of them each time: what ran out of memory half-way is taken up where it stopped, and what is there stays.
        for comes, goes in zip(model.parameters(), leaving.parameters(), strict=True):
            # First away, then here. What shares a number with either keeps the one that it was given.
            goes.data = goes.data.to("cpu")
            comes.data = comes.data.to(self.device)

    def bring_both(self) -> None:
        """For what computes with both at once; memory may run out."""
        for parameter in (*self.old.parameters(), *self.new.parameters()):
            parameter.data = parameter.data.to(self.device)

    @property
    def rows(self) -> dict[str, int]:
        """How many rows each tensor has, in the order of the forward; one tensor under two names is one."""
        return {name: rows_of(parameter) for name, parameter in self.new.named_parameters()}

    def score(self, model: Any, completions: Sequence[Completion]) -> Floats:
        """Logprobs of all output tokens under `model`, at temperature 1: old, new, or one that was made of them."""
        if model is self.old or model is self.new:
            self.bring(model)
        teacher = Teacher(model, layout=Layout.PADDED)
        sequences = [completion.sequence for completion in completions]
        starts = [len(completion.prompt_token_ids) for completion in completions]
        scores: Floats = torch.cat(list(teacher.logprobs(sequences, starts))).double().numpy()
        return scores

    def at_both(self, completions: Sequence[Completion]) -> tuple[Floats, Floats]:
        """Logprobs under the new weights and under the old ones; first those that need not be brought."""
        models = [self.new, self.old]
        models.sort(key=lambda model: next(model.parameters()).device != self.device)
        scores = {id(model): self.score(model, completions) for model in models}
        return scores[id(self.new)], scores[id(self.old)]

    def slopes(self, completions: Sequence[Completion]) -> Slopes:
        """How these logprobs follow the update of every row."""
        self.bring(self.new)
        return by_row(self.new, self.old.state_dict(), completions)

    def moved(self, moves: Iterable[Move]) -> Any:
        """The new model with less or more of some parts; whatever is not changed is shared with it, to be read only."""
        self.bring(self.new)
        mixed = sharing(self.new)
        old, new = self.old.state_dict(), dict(self.new.named_parameters())
        own = dict(mixed.named_parameters())
        for part, by in moves:
            for name in part.tensors:
                if by == -1 and part.rows is None:
                    own[name].data = old[name].to(self.device)
                    continue
                rows = slice(*(part.rows or (None,)))
                # In fp32 at least: the difference of two bf16 numbers is none, and a tenth of it is not.
                wide = torch.promote_types(new[name].dtype, torch.float32)
                changed = own[name].data.to(wide, copy=True)
                before = old[name][rows].to(self.device, wide)
                changed[rows] += by * (new[name].data[rows].to(wide) - before)
                own[name].data = changed.to(new[name].dtype)
        return mixed

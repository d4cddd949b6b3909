"""Two models that differ by a known update, and any mixture of them that an update gone wrong may have left."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from zerodrift.audit.counterfactual.exchanged import sharing
from zerodrift.audit.update.derivatives import by_row, rows_of
from zerodrift.audit.update.parts import Part, Slopes
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.completion import Completion
from zerodrift.models.family.registry import family_of
from zerodrift.stats.arrays import Floats


class Move(NamedTuple):
    """A part of the update, and what is there of it beyond the one time that it should be."""

    part: Part
    by: float
    """−1 where it did not arrive, 1 where it came twice."""


class UpdatedWeights:
    """Two models, old and new, that differ by a known amount in every tensor."""

    def __init__(self, old: Any, new: Any) -> None:
        """Both models stay as they are."""
        self.old, self.new = old, new
        self.family = family_of(new)

    @property
    def rows(self) -> dict[str, int]:
        """How many rows each tensor has, in the order of the forward; one tensor under two names is one."""
        return {name: rows_of(parameter) for name, parameter in self.new.named_parameters()}

    def score(self, model: Any, completions: Sequence[Completion]) -> Floats:
        """Logprobs of all output tokens under `model`, at temperature 1."""
        teacher = Teacher(model, layout=Layout.PADDED)
        sequences = [completion.sequence for completion in completions]
        starts = [len(completion.prompt_token_ids) for completion in completions]
        scores: Floats = torch.cat(list(teacher.logprobs(sequences, starts))).double().numpy()
        return scores

    def slopes(self, completions: Sequence[Completion]) -> Slopes:
        """How these logprobs follow the update of every row."""
        return by_row(self.new, self.old.state_dict(), completions)

    def moved(self, moves: Iterable[Move]) -> Any:
        """The new model with less or more of some parts; whatever is not changed is shared with it, to be read only."""
        mixed = sharing(self.new)
        old, new = self.old.state_dict(), dict(self.new.named_parameters())
        own = dict(mixed.named_parameters())
        for part, by in moves:
            for name in part.tensors:
                if by == -1 and part.rows is None:
                    own[name].data = old[name]
                    continue
                rows = slice(*(part.rows or (None,)))
                # In fp32 at least: the difference of two bf16 numbers is none, and a tenth of it is not.
                wide = torch.promote_types(new[name].dtype, torch.float32)
                changed = own[name].data.to(wide, copy=True)
                changed[rows] += by * (new[name].data[rows].to(wide) - old[name][rows].to(wide))
                own[name].data = changed.to(new[name].dtype)
        return mixed

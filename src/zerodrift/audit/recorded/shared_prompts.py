"""Scoring where many rollouts share a prompt, as those of a group do: it is computed once, and its keys and values serve all.

In 96 rollouts of 8 prompts half of all positions are prompts. What comes out is what a prefix cache would give: the same
numbers to rounding (`tests/unit/audit/recorded/test_shared_prompts.py`).
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerodrift.backends.teacher import Layout, LogitRows, Teacher
from zerodrift.models.family.abilities import has_kv_cache

LEAST_TOKENS = 16
"""Of a prompt that is worth a forward of its own."""


class SharedPrompts(Teacher):
    """A teacher of padded batches, in which a prompt that several sequences begin with is computed once."""

    def logit_rows(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[LogitRows]:
        """As any teacher's; sequences of one prompt come together, and those with a prompt of their own last."""
        groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
            self._check(ids, start)
            groups[tuple(ids[:start])].append(index)
        rest = []
        for prompt, members in groups.items():
            if len(members) < 2 or len(prompt) < LEAST_TOKENS:
                rest += members
            else:
                yield from self._after(prompt, members, sequences)
        rest.sort(key=lambda index: len(sequences[index]))
        if rest:
            for rows in super().logit_rows(
                [sequences[index] for index in rest], [starts[index] for index in rest]
            ):
                yield rows._replace(sequence=rest[rows.sequence])

    def _after(
        self, prompt: tuple[int, ...], members: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> Iterator[LogitRows]:
        """Rows of the outputs; the last prompt token goes with these, because its row predicts their first."""
        known = len(prompt) - 1
        cache = self._forward(torch.tensor([prompt[:-1]]), use_cache=True, logits_to_keep=1).past_key_values
        ordered = sorted(members, key=lambda index: len(sequences[index]))
        lengths = [len(sequences[index]) - len(prompt) for index in ordered]
        for begin, end in self._batches(lengths):
            rows = ordered[begin:end]
            longest = max(lengths[begin:end])
            ids_BL = torch.zeros(len(rows), longest, dtype=torch.long)
            mask_BL = torch.zeros(len(rows), known + longest, dtype=torch.long)
            for row, index in enumerate(rows):
                # Without the last token, which predicts nothing that was sampled.
                ids = sequences[index][known:-1]
                ids_BL[row, : len(ids)] = torch.tensor(list(ids))
                mask_BL[row, : known + len(ids)] = 1
            shared = copy.deepcopy(cache)
            shared.batch_repeat_interleave(len(rows))
            computed = self._compute(
                ids_BL, longest, self.model, attention_mask=mask_BL, past_key_values=shared, use_cache=True
            )
            for row, (index, length) in enumerate(zip(rows, lengths[begin:end], strict=True)):
                for part in self._parts(0, length):
                    yield LogitRows(index, part.start, computed.rows(row, part))


def scoring_teacher(model: Any, batch: int) -> Teacher:
    """One that shares prompts, where the model's keys and values can be shared."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or (
        [] if getattr(config, "sliding_window", None) is None else ["sliding_attention"]
    )
    # A layer with a window forgets what is behind it, each in its own way.
    whole = all(kind == "full_attention" for kind in kinds)
    shared = whole and has_kv_cache(model)
    return (SharedPrompts if shared else Teacher)(model, layout=Layout.PADDED, batch=batch)

"""Contracted logprobs of windows as a function of levers: their values, and their derivatives by every lever at once.

In reverse mode: a window of w judged tokens costs one forward and w backwards, each about as dear as a forward, however
many levers there are. For the 30 windows of 8 tokens that attribution looks at, that is nine forwards over them, for
every head, norm and single neuron of the model. Shapes: B windows, L positions, T rows that are kept, V vocabulary, S
numbers of a lever, N tokens, C columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from zerodrift.audit.counterfactual.evaluate import EXCLUDED_LOGPROB, Window
from zerodrift.audit.response.levers import Jacobian, Kind, Lever, Member
from zerodrift.audit.response.plumbing import Plumbing, Values, turned_logits
from zerodrift.sampler.processing import histories, processed_logprobs
from zerodrift.stats.arrays import Floats

BATCH = 8


class _Batch(NamedTuple):
    """Windows that run together, padded on the right."""

    numbers: list[int]
    ids_BL: torch.Tensor
    mask_BL: torch.Tensor
    kept_T: torch.Tensor
    """Positions whose rows are wanted by any window."""


class Response:
    """How the logprobs of some windows follow the levers of a model."""

    def __init__(self, model: Any, windows: Sequence[Window], stop_ids: Sequence[int]) -> None:
        """`model` is a transformers causal LM, which is left as it was."""
        self.windows, self.stop_ids = windows, stop_ids
        self.plumbing = Plumbing(model)
        self._ends = np.cumsum([0, *(len(window.judged) for window in windows)])
        self.levers = [*self.plumbing.levers, *_of_logits(model, windows)]

    def logprobs(self, settings: Mapping[Member, float]) -> Floats:
        """Contracted logprobs with some numbers of some levers set, and all others at 0."""
        found = np.empty(self._ends[-1])
        for batch in self._batches():
            values: dict[Lever, torch.Tensor] = {}
            for (lever, index), value in settings.items():
                values.setdefault(lever, self._zeros(batch, lever))[:, index] = value
            with torch.no_grad():
                for number, logprobs_T in zip(batch.numbers, self._forward(batch, values), strict=True):
                    found[self._span(number)] = logprobs_T.double().cpu().numpy()
        return np.maximum(found, EXCLUDED_LOGPROB)

    @cached_property
    def jacobian(self) -> Jacobian:
        """Derivatives where every lever is at 0."""
        places = [(lever, index) for lever in self.levers for index in range(lever.size)]
        matrix_NC = np.zeros((self._ends[-1], len(places)), dtype=np.float32)
        for batch in self._batches():
            values = {lever: self._zeros(batch, lever).requires_grad_() for lever in self.levers}
            with torch.enable_grad():
                logprobs = self._forward(batch, values)
                for place in range(max(len(each) for each in logprobs)):
                    rows = [(row, each[place]) for row, each in enumerate(logprobs) if place < len(each)]
                    total = torch.stack([value for _, value in rows if torch.isfinite(value)]).sum()
                    slopes = torch.autograd.grad(
                        total, list(values.values()), retain_graph=True, allow_unused=True
                    )
                    slopes_BC = _joined(slopes, values)
                    for row, _ in rows:
                        matrix_NC[self._ends[batch.numbers[row]] + place] = slopes_BC[row]
        return Jacobian({place: column for column, place in enumerate(places)}, matrix_NC)

    def _forward(self, batch: _Batch, values: Values) -> list[torch.Tensor]:
        """Logprobs of the judged tokens of each window of the batch."""
        model = self.plumbing.model
        prompts = [len(self.windows[number].prompt) for number in batch.numbers]
        with self.plumbing.turned(values, prompts):
            logits_BTV = model(
                batch.ids_BL,
                attention_mask=batch.mask_BL,
                use_cache=False,
                logits_to_keep=batch.kept_T,
            ).logits
        logits_BTV = turned_logits(
            values, logits_BTV if logits_BTV.dtype is torch.float64 else logits_BTV.float()
        )
        found = []
        for row, number in enumerate(batch.numbers):
            window = self.windows[number]
            first = len(window.prompt) + window.before - 1
            rows = torch.searchsorted(batch.kept_T, torch.arange(first, first + len(window.judged)))
            past = histories(window.prompt, window.output)[window.before :]
            drawn_TV = processed_logprobs(logits_BTV[row, rows], window.requested, past, self.stop_ids)
            tokens = torch.tensor(window.judged, device=drawn_TV.device)
            found.append(drawn_TV.gather(-1, tokens[:, None])[:, 0])
        return found

    def _zeros(self, batch: _Batch, lever: Lever) -> torch.Tensor:
        model = self.plumbing.model
        return torch.zeros(len(batch.numbers), lever.size, dtype=model.dtype, device=model.device)

    def _span(self, number: int) -> slice:
        return slice(*self._ends[number : number + 2])

    def _batches(self) -> Iterator[_Batch]:
        """Windows of like length together."""
        lengths = [len(window.prompt) + len(window.output) for window in self.windows]
        order = sorted(range(len(lengths)), key=lambda number: lengths[number])
        device = self.plumbing.model.device
        for begin in range(0, len(order), BATCH):
            numbers = order[begin : begin + BATCH]
            longest = max(lengths[number] for number in numbers)
            ids_BL = torch.zeros(len(numbers), longest, dtype=torch.long)
            mask_BL, kept = torch.zeros_like(ids_BL), set[int]()
            for row, number in enumerate(numbers):
                window, length = self.windows[number], lengths[number]
                ids_BL[row, :length] = torch.tensor([*window.prompt, *window.output])
                mask_BL[row, :length] = 1
                kept |= set(range(length - len(window.judged) - 1, length - 1))
            yield _Batch(numbers, ids_BL.to(device), mask_BL.to(device), torch.tensor(sorted(kept)))


def _joined(slopes: Sequence[torch.Tensor | None], values: Mapping[Lever, torch.Tensor]) -> Floats:
    """Derivatives by all levers side by side; one that nothing depends on has none."""
    parts = [
        torch.zeros_like(value) if slope is None else slope
        for slope, value in zip(slopes, values.values(), strict=True)
    ]
    joined: Floats = torch.cat(parts, dim=1).float().cpu().numpy()
    return joined


def _of_logits(model: Any, windows: Sequence[Window]) -> list[Lever]:
    """Levers that need no module. Rows are those of the judged tokens: others show in no reported number."""
    tokens = tuple(sorted({token for window in windows for token in window.judged}))
    levers = [
        Lever(Kind.LOGIT_SCALE, None, "", 1),
        Lever(Kind.LOGIT_ROW, None, "", len(tokens), labels=tokens),
    ]
    # Found on Gemma alone: what squeezes logits already is in them.
    if getattr(model.config, "final_logit_softcapping", None) is None:
        levers.append(Lever(Kind.SOFT_CAP, None, "", 1))
    return levers

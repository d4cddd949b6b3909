"""Does the checkpoint agree once the ids are other ids? Padding that was taken for tokens, and prompts of another template.

Each costs a forward, so that a few rollouts are asked first, and all of those that are off only where the few agree.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.audit.measure import measure
from zerodrift.audit.recorded.notation_readings import (
    AT_GATE,
    FITS_NINE_IN,
    MOST_NATS,
    OF_TEN,
    Fit,
    NotationReading,
    believed,
    size,
)
from zerodrift.audit.recorded.padding import Trimmed, padding_ids, trim
from zerodrift.audit.recorded.prompts import frame_of, other_prompts, system_prompts
from zerodrift.audit.recorded.timeline import observer
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.records.recorded import RecordedRollout
from zerodrift.stats.arrays import Floats, Ids

PROBED = 2
"""Rollouts that every other prompt is tried on; the shortest of different prompts."""
CHECKED = 16
"""Rollouts that have to agree then."""
HOPE = 0.5
"""An account that leaves more than this share of the difference of those probed is given up."""


class Rescored(NamedTuple):
    """Rollouts that are off, and the checkpoint to score them with under other ids."""

    reference: ReferenceBackend
    rollouts: Sequence[RecordedRollout]
    recorded: Floats
    """Mean |Δ| of each as it stands."""
    gate: float

    def fit(self) -> Fit | None:
        """Padding first, because it shows in the ids; other prompts are guesses."""
        return self.by_padding() or self.by_prompt()

    def by_padding(self) -> Fit | None:
        """Without what looks like padding: one id at a time, because another may be what prompts begin with."""
        off = self.recorded > self.gate
        best: tuple[float, list[Trimmed | None]] = (HOPE, [])
        for pad in self.pads():
            trimmed = self.trimmed(pad)
            changed = off & np.array([each is not None for each in trimmed])
            if not changed.any() or OF_TEN * changed.sum() < FITS_NINE_IN * off.sum():
                continue
            left = self._left(self._without(self._spaced(changed, PROBED), trimmed))
            best = min(best, (left, trimmed), key=lambda pair: pair[0])
        if not best[1]:
            return None
        changed = off & np.array([each is not None for each in best[1]])
        some = self._sizes(self._without(self._spaced(changed, CHECKED), best[1]))
        if self._believed(NotationReading("semantic/padding", "", some)) is None:
            return None
        return self._padded({index: best[1][index] for index in np.flatnonzero(changed).tolist()})

    def _padded(self, trimmed: Mapping[int, Trimmed | None]) -> Fit | None:
        """All of these, once some agree. What is cut behind an output is scored with it, because that changes no number
        before it: an end that carries the checkpoint's number was drawn."""
        known = {index: each for index, each in trimmed.items() if each is not None}
        whole = {index: each._replace(end=len(self.rollouts[index].output)) for index, each in known.items()}
        sizes = np.full(len(self.rollouts), np.inf)
        for index, delta in self._deltas(self._without(list(known), whole)).items():
            kept = known[index].end - known[index].begin
            sizes[index] = min(size(delta[:kept]), MOST_NATS)
            if len(delta) > kept and size(delta[kept:]) <= AT_GATE * self.gate:
                known[index] = whole[index]
        right = {index: each for index, each in known.items() if sizes[index] <= AT_GATE * self.gate}
        return self._believed(NotationReading("semantic/padding", _where(self.rollouts, right), sizes))

    def by_prompt(self) -> Fit | None:
        """Under another template or system prompt."""
        tokenizer = self.reference.tokenizer
        frame = frame_of(tokenizer)
        systems = system_prompts(tokenizer, frame, self.rollouts)
        probed = self._shortest()
        tried: dict[str, dict[int, RecordedRollout]] = {}
        for index in probed:
            for words, ids in other_prompts(tokenizer, frame, self.rollouts[index], systems):
                other = msgspec.structs.replace(self.rollouts[index], prompt=ids)
                tried.setdefault(words, {})[index] = other
        best = min(
            ((self._left(others), words) for words, others in tried.items() if len(others) == len(probed)),
            default=(1.0, ""),
        )
        if best[0] > HOPE:
            return None

        def fit(indices: Sequence[int]) -> Fit | None:
            others = {}
            for index in indices:
                prompts = dict(other_prompts(tokenizer, frame, self.rollouts[index], systems))
                if best[1] in prompts:
                    others[index] = msgspec.structs.replace(self.rollouts[index], prompt=prompts[best[1]])
            message = f"the numbers are those after another prompt: {best[1]}"
            return self._believed(NotationReading("semantic/template", message, self._sizes(others)))

        off = self.recorded > self.gate
        # All of them, once some agree: counts and dates are of these.
        return None if fit(self._spaced(off, CHECKED)) is None else fit(np.flatnonzero(off).tolist())

    def pads(self) -> list[int]:
        """Ids that may be padding."""
        pad = getattr(self.reference.tokenizer, "pad_token_id", None)
        known = [*([] if pad is None else [pad]), *self.reference.facts.eos_token_ids]
        return padding_ids(self.rollouts, known)

    def trimmed(self, pad: int) -> list[Trimmed | None]:
        """Every rollout without `pad` at its ends, where it has some."""
        return [trim(rollout, pad, self.reference.facts.eos_token_ids) for rollout in self.rollouts]

    def _without(
        self, indices: Sequence[int], trimmed: Sequence[Trimmed | None] | Mapping[int, Trimmed]
    ) -> dict[int, RecordedRollout]:
        chosen = {index: trimmed[index] for index in indices}
        return {
            index: without(self.rollouts[index], each) for index, each in chosen.items() if each is not None
        }

    def _left(self, others: dict[int, RecordedRollout]) -> float:
        """Share of the difference that is left."""
        sizes, asked = self._sizes(others), list(others)
        return float(sizes[asked].sum() / self.recorded[asked].sum())

    def _believed(self, account: NotationReading) -> Fit | None:
        return believed(iter([account]), np.where(np.isfinite(account.sizes), self.recorded, 0.0), self.gate)

    def _sizes(self, others: dict[int, RecordedRollout]) -> Floats:
        """Mean |Δ| of these; infinite for all that were not asked."""
        sizes = np.full(len(self.rollouts), np.inf)
        for index, delta in self._deltas(others).items():
            sizes[index] = min(size(delta), MOST_NATS)
        return sizes

    def _deltas(self, others: Mapping[int, RecordedRollout]) -> dict[int, Floats]:
        """Δ of every token of these, as far as they fit into the context."""
        stops = self.reference.facts.eos_token_ids
        context = self.reference.max_model_len
        kept = {
            index: other
            for index, other in others.items()
            if len(other.prompt) + len(other.output) <= context
        }
        observed = [observer(stops)(other) for other in kept.values()]
        measured = measure(self.reference.teacher, observed, stops)
        return {index: item.delta for index, item in zip(kept, measured, strict=True)}

    def _spaced(self, which: np.ndarray, most: int) -> list[int]:
        members: Ids = np.flatnonzero(which)
        count = min(most, len(members))
        return [int(members[at]) for at in np.linspace(0, len(members) - 1, count).round().astype(int)]

    def _shortest(self) -> list[int]:
        off = np.flatnonzero(self.recorded > self.gate).tolist()
        by_length = sorted(off, key=lambda i: len(self.rollouts[i].prompt) + len(self.rollouts[i].output))
        first = {self.rollouts[index].prompt: index for index in reversed(by_length)}
        return sorted(first.values(), key=by_length.index)[:PROBED]


def without(rollout: RecordedRollout, trimmed: Trimmed) -> RecordedRollout:
    """The rollout without its padding."""
    kept = slice(trimmed.begin, trimmed.end)
    trainer = rollout.trainer_logprobs
    return msgspec.structs.replace(
        rollout,
        prompt=trimmed.prompt,
        output=rollout.output[kept],
        logprobs=rollout.logprobs[kept],
        trainer_logprobs=None if trainer is None else trainer[kept],
    )


def _where(rollouts: Sequence[RecordedRollout], trimmed: Mapping[int, Trimmed]) -> str:
    """Which ends are padded, and in how many rollouts."""
    counts = dict.fromkeys(("prompts on the left", "prompts on the right", "outputs on the left"), 0)
    counts["outputs on the right"] = 0
    for index, each in trimmed.items():
        for name in _ends(rollouts[index], each):
            counts[name] += 1
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"ids hold padding: {told}"


def _ends(rollout: RecordedRollout, trimmed: Trimmed) -> Iterator[str]:
    cut = len(rollout.prompt) - len(trimmed.prompt)
    left = next(
        (at for at in range(cut + 1) if rollout.prompt[at:][: len(trimmed.prompt)] == trimmed.prompt), 0
    )
    if left:
        yield "prompts on the left"
    if left < cut:
        yield "prompts on the right"
    if trimmed.begin:
        yield "outputs on the left"
    if trimmed.end < len(rollout.output):
        yield "outputs on the right"

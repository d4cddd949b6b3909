"""The third side: does the trainer's own forward agree with the reference on the very same tokens?

The trainer is often the wrong side. Its numbers are taken through the `Scorer` that the user brings; where they leave
the reference, these accounts are told apart: sequences that leak into each other when packed, numbers that depend on
the micro-batch, positions that are off, numbers of a neighbour or at a temperature (`meanings.py`), and a forward in less
precision.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zerodrift.audit.checked_calls import score_user_forward
from zerodrift.audit.floor import ROUGHLY, Passage, measure_floor
from zerodrift.audit.probes.meanings import other_meaning
from zerodrift.audit.probes.result import ProbeResult, answered, found, vacuous, with_fix
from zerodrift.backends import variants
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Teacher, entries
from zerodrift.core.task import Scorer
from zerodrift.drift.gates import LEAST_TOKENS, Gates
from zerodrift.records.evidence import GapEvidence
from zerodrift.records.verdict import CauseFound, Outcome, Probe
from zerodrift.stats.arrays import Floats

NAME = Probe.TRAINER
WHOSE = "the trainer's scorer"
MOST_SEQUENCES = 32
ALONE = 6
EXPLAINED = 0.9
SAME_ROUNDING = 0.3
"""Share of a difference by rounding that may be left where it is the same rounding: batches of another shape round a little
otherwise. bf16 weights leave about as much as they had."""
RAW = (
    "have the scorer return logprobs at temperature 1, which is what it is asked for; in the training step, divide "
    "the logits by the temperature of the rollouts"
)
"""A scorer that divides as the training step rightly does is told what it is asked for, not to divide."""
LEAST_BEYOND, MOSTLY = 8, 0.5
"""Tokens beyond an onset, and the share of them that must be wrong."""


def trainer(
    scorer: Scorer, reference: ReferenceBackend, sequences: Sequence[tuple[int, ...]], gates: Gates
) -> ProbeResult:
    """Raw logprobs of whole sequences, the trainer's against the reference's."""
    sequences = sequences[:MOST_SEQUENCES]
    theirs, ours = (
        score_user_forward(scorer, sequences, WHOSE),
        [np.array(row) for row in reference.score(sequences)],
    )
    gaps = [np.abs(one - other) for one, other in zip(theirs, ours, strict=True)]
    gap = np.concatenate(gaps)
    evidence = GapEvidence(tokens=len(gap), mean=float(gap.mean()), max=float(gap.max()))
    if len(gap) < LEAST_TOKENS:
        return vacuous(NAME, f"{len(gap)} tokens; {LEAST_TOKENS} are needed", evidence)
    if gap.mean() <= gates.mean:
        return answered(NAME, Outcome.PASS, f"mean |Δ| {gap.mean():.3g} from the reference", evidence)
    # Alone, those that are wrong: a fault may reach only the longest.
    worst = sorted(range(len(gaps)), key=lambda number: -float(gaps[number].mean()))[:ALONE]
    cause = _cause(scorer, reference, sequences, {number: ours[number] for number in worst}, gates)
    return answered(NAME, Outcome.FAIL, cause.evidence, evidence, causes=(cause,))


def _cause(
    scorer: Scorer,
    reference: ReferenceBackend,
    sequences: Sequence[tuple[int, ...]],
    worst: Mapping[int, Floats],
    gates: Gates,
) -> CauseFound:
    """`worst` are the reference's scores of the sequences that the trainer is furthest from."""
    theirs = [score_user_forward(scorer, [sequences[n]], WHOSE)[0] for n in worst]
    gaps = [np.abs(one - right) for one, right in zip(theirs, worst.values(), strict=True)]
    every = np.concatenate(gaps)
    size = float(every.mean())
    if size <= gates.mean:
        return _batch_cause(scorer, reference, sequences)
    if (onset := _onset(gaps, gates)) is not None:
        message = f"scores are right up to position {onset} and wrong from there on"
        return found("trainer/positions", "trainer", NAME, message)
    if (
        meaning := other_meaning(reference, [sequences[n] for n in worst], theirs, list(worst.values()))
    ) is not None:
        cause = found(meaning.cause, "trainer", NAME, meaning.message, explained=meaning.explained)
        return with_fix(cause, RAW) if cause.cause == "semantic/temperature" else cause
    coarse = measure_floor(reference.model, [Passage(sequences[n], 1) for n in worst], "bfloat16", ROUGHLY)
    # Rounding reaches every token: one that is far off gives a mean of any size.
    if coarse.mean / 4 <= size <= coarse.mean * 4 and np.median(every) >= size / 10:
        message = f"mean |Δ| {size:.2g} has the size of bf16 rounding ({coarse.mean:.2g}), also for one sequence alone"
        return _narrow(reference, [sequences[n] for n in worst], theirs, list(worst.values()), message)
    message = f"scores of single sequences are off by {size:.2g} on average, and nothing known explains it"
    return found("unexplained", "trainer", NAME, message, explained=0.0, interval=(0.0, 0.0))


def _narrow(
    reference: ReferenceBackend,
    sequences: Sequence[tuple[int, ...]],
    theirs: Sequence[Floats],
    ours: Sequence[Floats],
    message: str,
) -> CauseFound:
    """Autocast only where the reference under autocast has these very numbers; by size alone, less precision."""
    right, told = np.concatenate(ours), np.concatenate(theirs)
    wide = variants.in_dtype(reference.model, torch.float32)
    with torch.autocast(wide.device.type, dtype=torch.bfloat16):
        cast = np.concatenate(list(Teacher(wide).score(sequences)))
    left = np.abs(told - cast).sum() / max(float(np.abs(told - right).sum()), 1e-30)
    if left < SAME_ROUNDING:
        message += f"; under autocast the reference gives the same, but for {left:.0%}"
        return found("trainer/autocast", "trainer", NAME, message)
    return found("trainer/precision", "trainer", NAME, message)


def _batch_cause(
    scorer: Scorer, reference: ReferenceBackend, sequences: Sequence[tuple[int, ...]]
) -> CauseFound:
    """Right alone and wrong together: does the sequence before it explain what the second one is given?"""
    message = "sequences are scored right alone and wrong in a batch"
    if len(sequences) < 2:
        return found("trainer/micro-batch", "trainer", NAME, message)
    first, second = sequences[0], sequences[1]
    together = score_user_forward(scorer, [first, second], WHOSE)[1]
    plain = np.array(reference.score([second])[0])
    leaked = entries(packed_logits(reference.model, first, second), second[1:]).double().numpy()
    before, after = np.abs(together - plain).sum(), np.abs(together - leaked).sum()
    if before > 0 and 1 - after / before > EXPLAINED:
        leak = f"a sequence sees the one packed before it: that explains {1 - after / before:.1%} of the difference"
        return found("trainer/packing", "trainer", NAME, leak, explained=float(1 - after / before))
    return found("trainer/micro-batch", "trainer", NAME, message)


@torch.no_grad()
def packed_logits(model: Any, first: Sequence[int], second: Sequence[int]) -> torch.Tensor:
    """Rows that predict tokens 1… of `second` after `first` in one row, with positions as packers number them."""
    ids = torch.tensor([[*first, *second]])
    positions = torch.cat([torch.arange(len(first)), torch.arange(len(second))])[None]
    # Restarting positions alone would make transformers cut the attention; an explicit mask keeps the leak.
    output = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    rows_TV: torch.Tensor = output.logits[0, len(first) : -1]
    return rows_TV


def _onset(gaps: Sequence[Floats], gates: Gates) -> int | None:
    """The position up to which every sequence is right and from which on they are wrong, if it lies inside."""
    wrong = [gap > 10 * gates.mean for gap in gaps]
    begins = [int(np.argmax(row)) for row in wrong if row.any()]
    first = min(begins, default=0)
    # A number that is wrong by itself begins nothing.
    beyond = np.concatenate([row[first:] for row in wrong])
    return first if first >= 2 and len(beyond) >= LEAST_BEYOND and beyond.mean() > MOSTLY else None

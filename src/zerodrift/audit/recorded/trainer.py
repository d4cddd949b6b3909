"""Why do the trainer's recorded numbers leave the reference, on the very tokens that the engine sampled?

The same accounts are tried as for an engine, and named as faults of a trainer: less precision is autocast, other
rotary positions are wrong position ids. One account is the trainer's own: sequences that were packed into one row and
see each other. The first of a row is right and the second is not, so that pairs of neighbours show it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from zerodrift.audit.attribute import Channel
from zerodrift.audit.diagnose import Suspect, diagnose
from zerodrift.audit.explain import attributed
from zerodrift.audit.measure import Measurement, Observed, tabulate
from zerodrift.audit.probes.result import found, with_fix
from zerodrift.audit.probes.trainer import packed_logits
from zerodrift.audit.recorded.notation_readings import Fit
from zerodrift.audit.recorded.weights import MOSTLY
from zerodrift.audit.response.signs import Signs, settled
from zerodrift.core.cause import CAUSES, UNEXPLAINED
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import Gates
from zerodrift.drift.shape import describe, shape
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import CauseFound, Probe
from zerodrift.sampler.processing import histories, processed_logprobs
from zerodrift.stats.arrays import Floats

NAME = Probe.TRAINER
OTHER_WEIGHTS = "score the same tokens with the weights that were saved"
EXCHANGED = f"{OTHER_WEIGHTS}; if those are the trainer's own, they belong behind --model, and the others behind --previous"
MOST_PAIRS = 3
EXPLAINED = 0.9


class OfTrainer(NamedTuple):
    """What its numbers show."""

    causes: tuple[CauseFound, ...]
    in_force: Mapping[str, float] = {}
    """Sampling parameters that explain them, where such do."""


def as_trainer(rollout: RecordedRollout, item: Measurement) -> Measurement:
    """The same tokens with the trainer's numbers in the place of the engine's."""
    assert rollout.trainer_logprobs is not None, "asked only where the trainer scored"
    completion = msgspec.structs.replace(item.observed.completion, logprobs=rollout.trainer_logprobs)
    return item._replace(observed=Observed(completion, item.observed.requested))


def trainer_causes(
    suspect: Suspect,
    measurements: Sequence[Measurement],
    floor: Floor,
    gates: Gates,
    rng: np.random.Generator,
) -> OfTrainer:
    """Named causes of the difference; `measurements` carry the trainer's numbers, in the order of the dump."""
    if (leak := _packing(suspect.model, measurements, gates)) is not None:
        return OfTrainer((leak,))
    attribution = diagnose(suspect, measurements, floor, gates, rng)
    # How tokens were drawn says nothing about the trainer.
    about_numbers = tuple(each for each in attribution.selected if each.channel is not Channel.SAMPLED)
    attribution = msgspec.structs.replace(attribution, selected=about_numbers)
    causes = attributed(attribution, NAME, describe(shape(tabulate(measurements, floor))))
    renamed = tuple(_renamed(cause) for cause in settled(causes, Signs(to_know=OTHER_WEIGHTS), NAME))
    return OfTrainer(renamed, attribution.explanation.sampling if about_numbers else {})


def written_otherwise(fit: Fit) -> OfTrainer:
    """Its numbers are right, and are written in another way."""
    return OfTrainer((_renamed(found(fit.account.cause, NAME, NAME, fit.evidence, explained=fit.explained)),))


def of_the_older(now: Floats, before: Floats | None, gates: Gates) -> CauseFound | None:
    """Every number that the trainer wrote is one of the weights from before; infinite where it wrote none."""
    if before is None:
        return None
    has = np.isfinite(now)
    now, before = now[has], before[has]
    if not len(now) or not ((before <= np.maximum(gates.mean, now / MOSTLY)) & (now > gates.mean)).all():
        return None
    evidence = (
        f"{len(now)} of {len(now)} rollouts have the trainer's numbers of the previous weights: mean |Δ| "
        f"{before.mean():.2g} from those and {now.mean():.2g} from the model"
    )
    explained = 1 - float(before.mean() / now.mean())
    return with_fix(found("weights/stale", NAME, NAME, evidence, explained=explained), EXCHANGED)


def _renamed(cause: CauseFound) -> CauseFound:
    name = CAUSES[cause.cause].in_trainer or cause.cause
    evidence = f"in the trainer's numbers: {cause.evidence}"
    # What is unexplained says by itself what to look at.
    fix = cause.fix if name == UNEXPLAINED else CAUSES[name].fix(NAME)
    renamed = msgspec.structs.replace(cause, cause=name, evidence=evidence, found_by=NAME.value)
    # What is in force in the engine says nothing about the trainer.
    return with_fix(renamed, fix)


def _packing(model: Any, measurements: Sequence[Measurement], gates: Gates) -> CauseFound | None:
    explained = 0.0
    for first, second in _suspicious(measurements, gates):
        leaked = _leaked(model, first.observed.completion.sequence, second)
        left = float(np.abs(leaked - second.reported).sum() / np.abs(second.delta).sum())
        explained = max(explained, 1 - left)
    if explained < EXPLAINED:
        return None
    message = (
        f"a sequence sees the one before it in the dump: that explains {explained:.1%} of the difference"
    )
    return found("trainer/packing", NAME, NAME, message, explained=explained)


def _suspicious(
    measurements: Sequence[Measurement], gates: Gates
) -> Iterator[tuple[Measurement, Measurement]]:
    """Neighbours of which the first is right and the second is not."""
    gaps = [float(np.abs(item.delta).mean()) for item in measurements]
    pairs = [i for i in range(1, len(gaps)) if gaps[i - 1] <= gates.mean < gaps[i] < np.inf]
    for i in pairs[:MOST_PAIRS]:
        yield measurements[i - 1], measurements[i]


def _leaked(model: Any, first: Sequence[int], second: Measurement) -> Floats:
    """Scores of the output of `second` after `first` in one row."""
    completion = second.observed.completion
    rows_TV = packed_logits(model, first, completion.sequence)[len(completion.prompt_token_ids) - 1 :]
    past = histories(completion.prompt_token_ids, completion.token_ids)
    drawn_TV = processed_logprobs(rows_TV, second.observed.requested, past)
    tokens = torch.tensor(completion.token_ids)
    scores: Floats = drawn_TV[torch.arange(len(tokens)), tokens].double().numpy()
    return scores

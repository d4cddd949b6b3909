"""Why do the trainer's recorded numbers leave the reference, on the very tokens that the engine sampled?

The same accounts are tried as for an engine, and named as faults of a trainer: less precision is autocast, other
rotary positions are wrong position ids. One account is the trainer's own: sequences that were packed into one row and
see each other. The first of a row is right and the second is not, so that pairs of neighbours show it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from zerodrift.audit import verdict as judging
from zerodrift.audit.diagnose import Suspect, diagnose
from zerodrift.audit.floor import Floor
from zerodrift.audit.measure import Floats, Measurement, Observed, tabulate
from zerodrift.audit.probes.parity import Gates
from zerodrift.audit.probes.result import found
from zerodrift.audit.shape import describe, shape
from zerodrift.core.cause import CAUSES
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import CauseFound
from zerodrift.sampler.processing import histories, processed_logprobs

NAME = "trainer"
MOST_PAIRS = 3
EXPLAINED = 0.9
# What a path cause of an engine is called where a trainer has it.
TRAINER_NAMES = {
    "path/head-precision": "trainer/autocast",
    "path/body-precision": "trainer/autocast",
    "path/kv-precision": "trainer/autocast",
    "path/rope": "trainer/positions",
    "path/context-boundary": "trainer/positions",
}
# What to do about it in a trainer, where the fixes of a cause are written for engines.
TRAINER_FIXES = {
    "semantic/raw-logprobs": "shape the trainer's logits as the request shaped the engine's, before the softmax",
    "semantic/temperature": "divide the trainer's logits by the temperature of the rollouts, once, before the softmax",
    "semantic/truncation-mass": "take the trainer's softmax over the tokens that the request keeps, and no others",
    "semantic/penalty": "take penalties that were not requested out of the trainer's forward",
    "semantic/logit-bias": "take biases and masks that were not requested out of the trainer's forward",
    "semantic/generation-config": "give the trainer the request's parameters, not those of generation_config.json",
    "semantic/off-by-one": "align the trainer's logits with its labels: those at position i-1 predict token i",
    "semantic/wrong-token": "gather the trainer's logprob at the sampled token id",
    "semantic/bos": "train on the token ids that the engine was sent, without adding or dropping a BOS",
    "semantic/template": "train on the token ids that the engine was sent; never render the template a second time",
    "path/weight-quantisation": "load the unquantised checkpoint in the trainer, or serve the same quantisation",
    "path/window": "use an attention in the trainer that keeps to the checkpoint's sliding_window",
}


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
) -> tuple[CauseFound, ...]:
    """Named causes of the difference; `measurements` carry the trainer's numbers, in the order of the dump."""
    if (leak := _packing(suspect.model, measurements, gates)) is not None:
        return (leak,)
    attribution = diagnose(suspect, measurements, floor, gates, rng)
    # How tokens were drawn says nothing about the trainer.
    about_numbers = tuple(finding for finding in attribution.findings if finding.channel != "sampled")
    attribution = msgspec.structs.replace(attribution, findings=about_numbers)
    causes = judging.attributed(attribution, NAME, describe(shape(tabulate(measurements, floor))))
    return tuple(_renamed(cause) for cause in causes)


def _renamed(cause: CauseFound) -> CauseFound:
    name = TRAINER_NAMES.get(cause.cause, cause.cause)
    fix = TRAINER_FIXES.get(name, CAUSES[name].fix(NAME))
    evidence = f"in the trainer's numbers: {cause.evidence}"
    return msgspec.structs.replace(cause, cause=name, fix=fix, evidence=evidence, found_by=NAME)


def _packing(model: Any, measurements: Sequence[Measurement], gates: Gates) -> CauseFound | None:
    explained = 0.0
    for first, second in _suspicious(measurements, gates):
        leaked = _leaked(model, first.observed.completion.sequence, second)
        left = float(np.abs(leaked - second.reported).sum() / np.abs(second.delta).sum())
        explained = max(explained, 1 - left)
    if explained < EXPLAINED:
        return None
    says = f"a sequence sees the one before it in the dump: that explains {explained:.1%} of the difference"
    return found("trainer/packing", NAME, NAME, says, explained=explained)


def _suspicious(
    measurements: Sequence[Measurement], gates: Gates
) -> Iterator[tuple[Measurement, Measurement]]:
    """Neighbours of which the first is right and the second is not."""
    gaps = [float(np.abs(item.delta).mean()) for item in measurements]
    pairs = [i for i in range(1, len(gaps)) if gaps[i - 1] <= gates.mean < gaps[i] < np.inf]
    for i in pairs[:MOST_PAIRS]:
        yield measurements[i - 1], measurements[i]


@torch.no_grad()
def _leaked(model: Any, first: Sequence[int], second: Measurement) -> Floats:
    """Scores of the output of `second` after `first` in one row, with positions that start anew."""
    completion = second.observed.completion
    ids = completion.sequence
    row = torch.tensor([[*first, *ids]])
    positions = torch.cat([torch.arange(len(first)), torch.arange(len(ids))])[None]
    # Restarting positions alone would make transformers cut the attention; an explicit mask keeps the leak.
    logits = model(row, position_ids=positions, attention_mask=torch.ones_like(row), use_cache=False).logits
    start = len(first) + len(completion.prompt_token_ids)
    past = histories(completion.prompt_token_ids, completion.token_ids)
    rows_TV = processed_logprobs(logits[0, start - 1 : -1], second.observed.requested, past)
    tokens = torch.tensor(completion.token_ids)
    scores: Floats = rows_TV[torch.arange(len(tokens)), tokens].double().numpy()
    return scores

"""Is this gap safe? The gradient of one archived batch by the engine's numbers, and by those of the checkpoint.

The checkpoint is the weights that made the tokens, and the step is taken at them: by true numbers every ratio is 1, and
all that differs from it is the engine's doing.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from zerodrift.audit.gradient.objective import ClipRange, Learned, Weights, learned, weights
from zerodrift.audit.gradient.sums import ALL, Pair, PartSums, cells_of
from zerodrift.core.errors import InvalidPrompt, InvalidValue, UnsupportedModel
from zerodrift.models.loading import load
from zerodrift.records.archived import ArchivedBatch
from zerodrift.records.gradient import GradientRecord
from zerodrift.stats.arrays import Floats, Ids

MOST_PARAMETERS = 300_000_000
"""Three gradients in fp32 beside the model: 5 GB."""
MOST_FOR_PARTS = 20_000_000
"""Eleven parts of two gradients each: 1.8 GB."""
LOGIT_BYTES = 2**28
"""Most logits in fp32 at once; their gradient takes as much again."""
SMALL = 0.1
"""Of chance. Two errors that know nothing of one another add by squares: a tenth makes the whole half a percent longer."""


class _Scored(NamedTuple):
    """Some rollouts of one group, token after token: log p with how it came about, and the weights of both sides."""

    logprobs: torch.Tensor
    policy: Floats
    behavior: Floats
    places: Ids
    engine: Weights
    true: Weights


def compare(
    batch: ArchivedBatch,
    model: str | Path | Any,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    temperature: float | None = None,
    by_part: bool = True,
) -> GradientRecord:
    """`model` is a checkpoint, `testbed:NAME` or a loaded model: the weights that made the tokens of `batch`.

    `epsilon` is the trainer's clip; `temperature` what it divides logits by, where the archive does not state it.
    Without `by_part` the whole batch alone is compared, in a fifth of the time.
    """
    clip = ClipRange.of(epsilon, epsilon_high)
    groups = learned(batch, temperature)
    if not any(rollout.advantage for group in groups for rollout in group):
        raise InvalidValue(
            "the rewards of every group are equal, so the batch has no gradient by any numbers"
        )
    module = load(model, "float32") if isinstance(model, str | Path) else model
    parameters = _parameters(module)
    size = sum(parameter.numel() for parameter in parameters)
    sums = PartSums(size, by_part=by_part and size <= MOST_FOR_PARTS)
    for group in groups:
        for rollouts in _batches([rollout for rollout in group if rollout.places.size], module):
            _add(sums, _score(module, rollouts, clip), parameters)
        sums.end_group()
    left_out = by_part and not sums.by_part
    assumed = [f"parts are left out: the model has {size:,} parameters"] if left_out else []
    return _record(batch, groups, clip, sums, assumed)


def _parameters(module: Any) -> list[torch.nn.Parameter]:
    found: list[torch.nn.Parameter] = list(module.parameters())
    size = sum(parameter.numel() for parameter in found)
    if size > MOST_PARAMETERS:
        raise UnsupportedModel(
            f"the model has {size:,} parameters, and gradients of at most {MOST_PARAMETERS:,} are compared; a smaller "
            "checkpoint of the same training answers as well"
        )
    for parameter in found:
        parameter.requires_grad_(True)  # noqa: FBT003 - torch's own signature
    return found


def _batches(rollouts: Sequence[Learned], module: Any) -> Iterator[list[Learned]]:
    """As many at once as LOGIT_BYTES allow, one at least."""
    vocabulary = module.get_input_embeddings().weight.shape[0]
    chosen: list[Learned] = []
    for rollout in rollouts:
        longest = max(len(each.prompt) + len(each.output) for each in (*chosen, rollout))
        if chosen and (len(chosen) + 1) * longest * vocabulary * 4 > LOGIT_BYTES:
            yield chosen
            chosen = []
        chosen.append(rollout)
    if chosen:
        yield chosen


def _score(module: Any, rollouts: Sequence[Learned], clip: ClipRange) -> _Scored:
    """Padded on the right, where a causal model does not look."""
    device, vocabulary = next(module.parameters()).device, module.get_input_embeddings().weight.shape[0]
    longest = max(len(rollout.prompt) + len(rollout.output) for rollout in rollouts)
    ids_BL = torch.zeros((len(rollouts), longest), dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for row, rollout in enumerate(rollouts):
        ids = [*rollout.prompt, *rollout.output]
        if not rollout.prompt or max(ids) >= vocabulary:
            raise InvalidPrompt(
                f"a rollout has {len(rollout.prompt)} prompt tokens and ids up to {max(ids)}, and the model {vocabulary} ids; "
                "is it the checkpoint that made them?"
            )
        ids_BL[row, : len(ids)] = torch.tensor(ids)
        mask_BL[row, : len(ids)] = 1
    logits_BLV = module(input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device)).logits
    found = [_logprobs(logits_BLV[row], rollout) for row, rollout in enumerate(rollouts)]
    policies = [each.detach().cpu().double().numpy() for each in found]
    engine = [
        weights(policy, rollout.behavior, rollout.advantage, clip)
        for policy, rollout in zip(policies, rollouts, strict=True)
    ]
    true = [
        weights(policy, policy, rollout.advantage, clip)
        for policy, rollout in zip(policies, rollouts, strict=True)
    ]
    return _Scored(
        torch.cat(found),
        np.concatenate(policies),
        np.concatenate([rollout.behavior for rollout in rollouts]),
        np.concatenate([rollout.places for rollout in rollouts]),
        _joined(engine),
        _joined(true),
    )


def _joined(parts: Sequence[Weights]) -> Weights:
    return Weights(
        np.concatenate([part.values for part in parts]), np.concatenate([part.clipped for part in parts])
    )


def _logprobs(logits_LV: torch.Tensor, rollout: Learned) -> torch.Tensor:
    """Of the tokens that are learnt, at the trainer's temperature."""
    places = torch.from_numpy(rollout.places)
    targets = torch.tensor(rollout.output)[places].to(logits_LV.device)
    rows_TV = logits_LV[(places + len(rollout.prompt) - 1).to(logits_LV.device)]
    scaled_TV = torch.log_softmax(rows_TV.float() / rollout.temperature, dim=-1)
    return scaled_TV.gather(1, targets[:, None])[:, 0]


def _add(sums: PartSums, scored: _Scored, parameters: Sequence[torch.nn.Parameter]) -> None:
    """What these rollouts add to every part."""
    gap = np.abs(scored.policy - scored.behavior)
    changed = scored.engine.clipped != scored.true.clipped
    cells = list(cells_of(scored.places, scored.policy, by_part=sums.by_part))
    for place, (cell, chosen) in enumerate(cells):
        sums.count(cell, int(chosen.sum()), float(gap[chosen].sum()), int(changed[chosen].sum()))
        if not scored.true.values.any():
            continue
        last = place == len(cells) - 1
        engine, true = (
            _flat(scored.logprobs, side.values * chosen, parameters, keep=not last or side is scored.engine)
            for side in (scored.engine, scored.true)
        )
        sums.add(cell, Pair(engine, true))


def _flat(
    logprobs: torch.Tensor, factors: Floats, parameters: Sequence[torch.nn.Parameter], *, keep: bool
) -> torch.Tensor:
    """The gradient of Σ factor · log p, as one vector."""
    found = torch.autograd.grad(
        logprobs,
        list(parameters),
        grad_outputs=torch.from_numpy(factors).to(logprobs),
        retain_graph=keep,
        allow_unused=True,
    )
    return torch.cat(
        [
            (torch.zeros_like(parameter) if gradient is None else gradient).reshape(-1)
            for gradient, parameter in zip(found, parameters, strict=True)
        ]
    )


def _record(
    batch: ArchivedBatch,
    groups: Sequence[Sequence[Learned]],
    clip: ClipRange,
    sums: PartSums,
    assumed: Sequence[str],
) -> GradientRecord:
    whole, error, noise = sums.part(ALL), sums.error(), sums.noise(len(groups))
    flat = sum(not any(rollout.advantage for rollout in group) for group in groups)
    return GradientRecord(
        step=batch.step,
        rollouts=len(batch.rollouts),
        groups=len(groups),
        without_advantage=flat,
        epsilon_low=clip.low,
        epsilon_high=clip.high,
        whole=whole,
        error=error,
        noise=noise,
        parts=tuple(sums.part(cell) for cell in sums.cells if cell != ALL),
        assumed=(
            *assumed,
            "the checkpoint is the weights that made these tokens, and the step is its first update",
            "every token of the batch counts alike; advantages are (reward - mean) / (spread + 1e-4) within a group",
        ),
        message=" ".join(_sentences(whole.cosine, whole.norm_ratio, whole.clip_changed, error, noise)),
    )


def _sentences(
    cosine: float | None, ratio: float | None, changed: float, error: float | None, noise: float | None
) -> Iterator[str]:
    if cosine is None or ratio is None or error is None:
        yield "One of the two sets of numbers clips every token that has an advantage: it has no gradient."
        return
    angle = math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
    yield (
        f"By the engine's numbers this step turns by {angle:.2g}° and is {ratio:.3g} times as long; {100 * changed:.2g} % of "
        "its tokens are clipped otherwise."
    )
    if noise is None:
        yield "With one group nothing can be said of chance."
    elif error <= SMALL * noise:
        yield f"That is small beside chance: it moves the gradient by {error:.2g} of its length, and which prompts were drawn by {noise:.2g}."
    elif error <= noise:
        yield f"It moves the gradient by {error:.2g} of its length, and which prompts were drawn by {noise:.2g}; chance averages out over steps, and a gap does not."
    else:
        yield f"That is more than chance: it moves the gradient by {error:.2g} of its length, and which prompts were drawn by {noise:.2g}. Do not train on it."

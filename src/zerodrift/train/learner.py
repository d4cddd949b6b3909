"""The learner: logprobs of a batch with their gradients, the objective's loss, one step of AdamW.

Sequences are packed in the order of the batch, so that the same batch is always cut into the same parts: the gradient is a
sum, and its bits depend on the order of its terms.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zerodrift.config.training import CorrectionName, Overlong, TrainConfig, ZeroAdvantage
from zerodrift.core.completion import FinishReason
from zerodrift.core.errors import NonFinite
from zerodrift.engine.output import Output
from zerodrift.exact.logprobs import token_logprobs
from zerodrift.train.objectives.base import LossInputs, RatioBounds, Totals
from zerodrift.train.objectives.registry import OBJECTIVES
from zerodrift.train.objectives.terms import correction_weights, entropy, reference_kl
from zerodrift.train.records import GroupRecord


class WeighedRollout(NamedTuple):
    """One rollout with what it earned beside its group."""

    output: Output
    advantage: float
    learnt: bool
    """Whether it is part of the loss."""


class Learnt(NamedTuple):
    """What one pass over a batch showed, in the order of the batch."""

    logprobs: list[torch.Tensor]
    """Of every token, by the weights that the pass began with."""
    loss: float
    clip_rate: float
    kl: float | None


class Learner:
    """Model, optimizer and objective. `reference` is a frozen model where a KL to it is asked for."""

    def __init__(self, model: Any, config: TrainConfig, reference: Any = None) -> None:
        """`model` is prepared (`exact.prepare`), and trained in place."""
        self.model, self.config, self._reference = model, config, reference
        self._objective = OBJECTIVES[config.objective]
        own = self._objective.clip
        self._clip = RatioBounds(
            own.low if config.clip_low is None else config.clip_low,
            own.high if config.clip_high is None else config.clip_high,
        )
        self.parameters = dict(model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self._first_pass = True

    def sequences(self, groups: Sequence[GroupRecord]) -> list[WeighedRollout]:
        """Every rollout of a batch; rewards that belong to other outputs are refused here."""
        skips = self.config.zero_advantage is ZeroAdvantage.SKIP
        masks = self.config.overlong is Overlong.MASK
        found = []
        for group in groups:
            advantages = self._objective.advantages(group.values())
            teaches = not skips or any(advantages)
            for output, advantage in zip(group.outputs, advantages, strict=True):
                cut_off = masks and output.finish_reason is FinishReason.LENGTH
                found.append(WeighedRollout(output, advantage, teaches and not cut_off))
        return found

    def gradients(self, batch: Sequence[WeighedRollout], old: Sequence[torch.Tensor] | None = None) -> Learnt:
        """Gradients of the whole batch are in the parameters when this returns; `old`: logprobs of the first pass.

        What is no part of the loss is scored all the same, without gradients, so that every token is seen by the monitor.
        """
        self._first_pass = old is None
        self.optimizer.zero_grad(set_to_none=True)
        logprobs: list[torch.Tensor] = [torch.empty(0)] * len(batch)
        totals = _totals(batch)
        loss, clipped, kl = 0.0, 0, 0.0
        for places in self._packed(batch, learnt=True):
            found = logprobs_of(self.model, [batch[place].output for place in places])
            inputs = self._inputs(batch, places, found, old, totals)
            part = self._objective.loss(inputs, self._clip)
            added, kl_sum = self._added(batch, places, inputs)
            whole = part.loss + added
            whole.backward()  # type: ignore[no-untyped-call]
            loss, clipped, kl = loss + whole.item(), clipped + part.clipped, kl + kl_sum
            for place, row in zip(places, found, strict=True):
                logprobs[place] = row.detach()
        if not math.isfinite(loss):
            raise self._non_finite(f"the loss of the batch is {loss}")
        with torch.no_grad():
            for places in self._packed(batch, learnt=False):
                rows = logprobs_of(self.model, [batch[place].output for place in places])
                for place, row in zip(places, rows, strict=True):
                    logprobs[place] = row
        tokens = max(1, totals.tokens)
        return Learnt(logprobs, loss, clipped / tokens, kl / tokens if self._reference is not None else None)

    def apply(self) -> float:
        """One step of the optimizer; returns the norm of the gradients before any were shortened."""
        if all(parameter.grad is None for parameter in self.parameters.values()):
            return 0.0  # no sequence of the batch teaches anything
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise self._non_finite(f"the gradients have a norm of {norm.item()}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def discard(self) -> None:
        """Forget the gradients: a batch that is not to be trained on."""
        self.optimizer.zero_grad(set_to_none=True)

    def _non_finite(self, found: str) -> NonFinite:
        """The error to raise. Gradients are forgotten; what earlier passes over the batch did to the weights is not."""
        self.discard()
        left = (
            "the weights stay as they were"
            if self._first_pass
            else "earlier passes over the batch changed the weights in memory, which were not recorded or published"
        )
        return NonFinite(
            f"{found}; {left}: look at the rewards, or start another run with a lower train.learning_rate"
        )

    def _packed(self, batch: Sequence[WeighedRollout], *, learnt: bool) -> Iterator[list[int]]:
        """Places of sequences, as many as fit into a micro batch; one that is longer by itself."""
        places: list[int] = []
        tokens = 0
        for place, each in enumerate(batch):
            if each.learnt is not learnt or not each.output.token_ids:
                continue
            size = len(each.output.prompt_token_ids) + len(each.output.token_ids)
            if places and tokens + size > self.config.micro_batch_tokens:
                yield places
                places, tokens = [], 0
            places.append(place)
            tokens += size
        if places:
            yield places

    def _inputs(
        self,
        batch: Sequence[WeighedRollout],
        places: Sequence[int],
        found: Sequence[torch.Tensor],
        old: Sequence[torch.Tensor] | None,
        totals: Totals,
    ) -> LossInputs:
        current = torch.cat(list(found))
        engine = torch.tensor([value for place in places for value in batch[place].output.logprobs])
        trainer = current.detach() if old is None else torch.cat([old[place] for place in places])
        corrected = self.config.correction is not CorrectionName.NONE
        return LossInputs(
            current=current,
            # With a correction the engine's distance to the trainer is the weight's, and the ratio is the update's alone.
            old=trainer if corrected else engine,
            weight=correction_weights(self.config.correction, self.config.correction_cap, trainer, engine),
            advantage=torch.tensor([batch[place].advantage for place in places]),
            lengths=torch.tensor([len(row) for row in found]),
            totals=totals,
        )

    def _added(
        self, batch: Sequence[WeighedRollout], places: Sequence[int], inputs: LossInputs
    ) -> tuple[torch.Tensor, float]:
        """The terms beside the objective, and the sum of the KL over tokens."""
        added, kl = torch.zeros(()), 0.0
        if self._reference is not None:
            with torch.no_grad():
                reference = torch.cat(logprobs_of(self._reference, [batch[place].output for place in places]))
            k3_T = reference_kl(inputs.current, reference)
            kl = float(k3_T.detach().sum())
            added = added + self.config.kl_coef * self._objective.mean(k3_T, inputs)
        if self.config.entropy_coef:
            added = added - self.config.entropy_coef * self._objective.mean(entropy(inputs), inputs)
        return added, kl


def logprobs_of(model: Any, outputs: Sequence[Output]) -> list[torch.Tensor]:
    """Of every output; an answer that a prompt was given several times is computed once, and its gradients add up.

    A forward's bits do not depend on what stands beside a sequence, so each copy has the number that it would have had by
    itself. Of 400 answers to 25 sums about 130 differ, and a step's time is that of its sequences.
    """
    distinct = {(output.request_id, output.token_ids): output for output in outputs}
    rows = dict(zip(distinct, token_logprobs(model, list(distinct.values())), strict=True))
    return [rows[output.request_id, output.token_ids] for output in outputs]


def _totals(batch: Sequence[WeighedRollout]) -> Totals:
    learnt = [len(each.output.token_ids) for each in batch if each.learnt and each.output.token_ids]
    return Totals(sum(learnt), len(learnt))

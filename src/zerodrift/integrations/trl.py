"""A TRL `GRPOTrainer` under watch: every generation batch is judged before it is trained on.

    watch = attach(trainer)
    trainer.train()

A callback sees no tokens, so methods are wrapped on this one trainer (`trl_checks.WRAPPED`) and put back by `detach`. A
batch that must not be trained on gets no advantage and no mask, so that its gradient is 0; and where an optimizer step has
nothing but such batches its gradients are removed, since momentum and weight decay move weights without any.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from zerodrift.core.errors import InvalidValue
from zerodrift.integrations import trl_scores
from zerodrift.integrations.metrics import LEVELS, PREFIX, Window, metrics_of
from zerodrift.integrations.sinks.base import Sink, Sinks
from zerodrift.integrations.trl_batch import OLD, SAMPLING, batch_of, rewards_of
from zerodrift.integrations.trl_checks import (
    check_generation,
    check_given,
    check_quarantine,
    check_trainer,
    generates_itself,
)
from zerodrift.monitor.archive import Archive
from zerodrift.monitor.decision import Decision, Measured, State
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.ranks import Gather

logger = logging.getLogger("zerodrift.trl")

TRL_NAMES = {
    "sampling/sampling_logp_difference/mean": "mean_abs",
    "sampling/sampling_logp_difference/max": "max",
}
"""TRL's own names for the total gap; it logs them with vLLM and the correction only, and its own value wins then."""
OWN = {
    "unscorable": "completions to which no reward function gave a reward; rewards of that batch are not judged",
    "seconds": "that judging took, the trainer's extra forward included",
    "sink_failures": "calls of sinks that failed so far",
}
"""What is logged beside `metrics.MEANINGS`."""


def attach(
    trainer: Any,
    monitor: Monitor | None = None,
    archive: Archive | str | Path | None = None,
    *,
    directory: str | Path | None = None,
    report: bool = True,
    sinks: Sequence[Sink] = (),
) -> "Watch":
    """Judge every batch of `trainer`, log through its `report_to`, keep back what is bad, stop at a halt.

    `directory`: where the default monitor writes what `zerodrift view` shows, bad batches included; `archive`: those alone.
    Give your own `monitor` its own. `sinks` get every decision; they, and the default monitor, are closed by `detach`.
    """
    check_trainer(trainer)
    check_given(monitor, sinks)
    if monitor is not None and (archive is not None or directory is not None):
        raise InvalidValue(
            "archive and directory belong to the monitor: attach(trainer, Monitor(directory=…))"
        )
    taken = [
        name for name, value in vars(trainer).items() if isinstance(getattr(value, "__self__", None), Watch)
    ]
    if taken:
        raise InvalidValue(f"this trainer is being watched already ({', '.join(taken)}); detach that first")
    check_generation(trainer)
    accelerator = trainer.accelerator
    owned = monitor is None
    if monitor is None:
        many = accelerator.num_processes > 1
        if many and isinstance(archive, str | Path):
            # An archive has one writer.
            archive = Path(archive) / f"rank{accelerator.process_index}"
        if directory is not None and accelerator.process_index:
            directory = Path(directory) / f"rank{accelerator.process_index}"
        monitor = Monitor(
            directory=directory, archive=archive, gather=gather_of(accelerator) if many else None
        )
    with ExitStack() as undo:
        if owned:
            undo.callback(monitor.close)
        check_quarantine(trainer, monitor)
        told = Sinks(sinks if accelerator.is_main_process else ())
        return Watch(trainer, monitor, told, report=report, held=undo.pop_all())


def gather_of(accelerator: Any) -> Gather:
    """Everybody's bytes for one's own, by the accelerator that the trainer uses anyway."""

    def gather(mine: bytes) -> list[bytes]:
        payload = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(accelerator.device)
        lengths = accelerator.gather(torch.tensor([len(mine)], device=accelerator.device)).tolist()
        padded = accelerator.pad_across_processes(payload, dim=0)
        parts = accelerator.gather(padded[None]).cpu()
        return [bytes(part[:length].tolist()) for part, length in zip(parts, lengths, strict=True)]

    return gather


class Watch:
    """An attached monitor; `detach` (or leaving its `with`) puts the trainer back as it was."""

    def __init__(
        self, trainer: Any, monitor: Monitor, sinks: Sinks, *, report: bool, held: ExitStack
    ) -> None:
        """By `attach`, which has checked the trainer. `held`: what `detach` lets go of."""
        self.trainer, self.monitor, self._sinks, self._held = trainer, monitor, sinks, held
        self.last: Decision | None = None
        """The last decision."""
        self.kept_back = 0
        """Batches that were not trained on."""
        self._window = Window()
        self._rewards: torch.Tensor | None = None
        self._recorded = False
        self._level = LEVELS[State.OK]
        self._trained = False
        self._of_step = (-1, 0)
        self._replaced: dict[str, Callable[..., Any]] = {}
        self._replace("_generate_and_score_completions", self._judged)
        self._replace("_calculate_rewards", self._with_rewards)
        if generates_itself(trainer):
            self._replace("_generate_single_turn", self._with_logprobs)
        self._reports = report
        if report:
            self._replace("log", self._with_metrics)
        self._callback = _Control(self)
        trainer.add_callback(self._callback)

    def __enter__(self) -> "Watch":
        """Attached already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    def _replace(self, name: str, by: Callable[..., Any]) -> None:
        self._replaced[name] = getattr(self.trainer, name)
        setattr(self.trainer, name, by)

    def detach(self) -> None:
        """Once more does no harm. Refused where somebody has wrapped one of the methods since: theirs would call ours."""
        mine = {name: getattr(self.trainer, name) for name in self._replaced}
        if other := [name for name, found in mine.items() if getattr(found, "__self__", None) is not self]:
            raise InvalidValue(f"{', '.join(other)} were wrapped again since; undo that first, then detach")
        for name, original in self._replaced.items():
            if getattr(original, "__func__", None) is getattr(type(self.trainer), name, self):
                delattr(self.trainer, name)
            else:
                setattr(self.trainer, name, original)
        if self._replaced:
            self.trainer.remove_callback(self._callback)
            self._sinks.close()
            self._held.close()
        self._replaced = {}

    # --- what is called in place of the trainer's own ----------------------------------------------------------------

    def _with_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        with trl_scores.recorded(self.trainer.model) as found:
            completion_ids, logprobs = self._replaced["_generate_single_turn"](*args, **kwargs)
        if logprobs is not None or not found:
            return completion_ids, logprobs
        self._recorded = True
        return completion_ids, trl_scores.rows(found, completion_ids)

    def _with_rewards(self, *args: Any, **kwargs: Any) -> Any:
        self._rewards = self._replaced["_calculate_rewards"](*args, **kwargs)
        return self._rewards

    def _with_metrics(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.trainer.model.training:
            # TRL adds its own after these, and those of the same name replace them.
            logs.update(self._window.take())
        self._replaced["log"](logs, *args, **kwargs)

    def _judged(self, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        self._recorded, self._rewards = False, None
        output: dict[str, Any] = self._replaced["_generate_and_score_completions"](inputs)
        if self.trainer.model.training:
            self._judge(inputs, output)
        if self._recorded:
            # TRL had none before it was watched, and its losses may read them.
            output.pop(SAMPLING, None)
        return output

    def _judge(self, inputs: Sequence[Mapping[str, Any]], output: dict[str, Any]) -> None:
        began = time.perf_counter()
        given = batch_of(self.trainer, inputs, output)
        own: dict[str, float] = {}
        if self._rewards is not None:
            rewards = rewards_of(self.trainer, self._rewards, len(output["completion_ids"]))
            own["unscorable"] = float(rewards.isnan().sum())
            if not own["unscorable"]:
                given["rewards"] = rewards
        decision = self.last = self.monitor.observe(**given, step=self._step())
        self._level = self._worst(decision)
        if self._bad:
            self.kept_back += 1
            keep_back(output)
        self._tell(decision)
        self._sinks.emit(decision)
        own["seconds"] = time.perf_counter() - began
        own["sink_failures"] = self._sinks.failures
        if self._reports:
            named = {PREFIX + name: value for name, value in own.items()}
            self._window.add({**metrics_of(decision), **_as_trl(decision), **named})

    def _step(self) -> int:
        """The trainer's global_step; where it generates several times within one, steps count generations."""
        now = int(self.trainer.state.global_step)
        place = self._of_step[1] + 1 if self._of_step[0] == now else 0
        self._of_step = (now, place)
        return now * self._most_generations + place

    @property
    def _most_generations(self) -> int:
        """Within one global_step. Where some have fewer, numbers are left out; none comes twice."""
        every: int = self.trainer.args.steps_per_generation * self.trainer.num_iterations
        return -(-int(self.trainer.args.gradient_accumulation_steps) // every)

    def _worst(self, decision: Decision) -> int:
        """Of all ranks: a batch is trained on by all or by none."""
        level = LEVELS[decision.state]
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return level
        levels = accelerator.gather(torch.tensor([level], device=accelerator.device))
        return int(levels.max().item())

    def _tell(self, decision: Decision) -> None:
        why = "; ".join(f"[{reason.code}] {reason.message}" for reason in decision.reasons)
        if self._level == LEVELS[State.HALT]:
            logger.error(
                "step %d: HALT, this batch is not trained on and training stops: %s", decision.step, why
            )
        elif self._level == LEVELS[State.QUARANTINE]:
            logger.warning("step %d: QUARANTINE, this batch is not trained on: %s", decision.step, why)
        elif self._level == LEVELS[State.WARN]:
            logger.warning("step %d: WARN: %s", decision.step, why)

    # --- what the callback asks --------------------------------------------------------------------------------------

    def began(self) -> None:
        """A training that goes on from a checkpoint, or begins anew, has steps that were there before."""
        seen, now = self.monitor.remembered.step, int(self.trainer.state.global_step)
        self._of_step, self._trained, self._level = (-1, 0), False, LEVELS[State.OK]
        first = now * self._most_generations
        if seen is not None and seen >= first:
            logger.warning(
                "the monitor has seen step %d and training goes on at %d: it is set back", seen, first
            )
            self.monitor.rewind(first - 1, None)

    def micro_batch(self) -> None:
        """One more was added to the gradients; it is of the last batch that was generated."""
        self._trained = self._trained or not self._bad

    def before_step(self, optimizer: Any) -> None:
        """An optimizer step that has nothing but bad batches is none: no parameter without a gradient is touched."""
        self.micro_batch()
        if not self._trained:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        self._trained = False

    @property
    def halted(self) -> bool:
        """Whether training has to stop."""
        return self._level == LEVELS[State.HALT]

    @property
    def _bad(self) -> bool:
        """The batch that is being trained on, or rather is not."""
        return self._level > LEVELS[State.WARN]


def keep_back(output: dict[str, Any]) -> None:
    """No advantage, no mask and no ratio: whatever the loss, its gradient is 0. Attention stays as it was."""
    output["advantages"] = torch.zeros_like(output["advantages"])
    output["tool_mask"] = torch.zeros_like(output["completion_mask"])
    # 0 · NaN is NaN: numbers that made the batch bad must not reach the loss at all.
    output.pop(OLD, None)
    output.pop(SAMPLING, None)
    if "importance_sampling_ratio" in output:
        output["importance_sampling_ratio"] = torch.zeros_like(output["importance_sampling_ratio"])


def _as_trl(decision: Decision) -> dict[str, float]:
    if not isinstance(decision.total, Measured):
        return {}
    return {name: getattr(decision.total, field) for name, field in TRL_NAMES.items()}


class _Control(TrainerCallback):  # type: ignore[misc]
    """The trainer's own places to stop, and to step or not."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.began()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.micro_batch()
        control.should_training_stop |= self._watch.halted

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.before_step(kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= self._watch.halted

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.monitor.end()

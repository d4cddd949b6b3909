"""Whether a trainer is one that is known here: asked before anything is wrapped, and refused by name."""

import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from zerodrift.core.errors import InvalidValue, MissingExtra
from zerodrift.monitor.monitor import Monitor

KNOWN = ("1.13", "1.14", "1.15", "1.16")
"""Releases whose source was read for what is wrapped; 1.16.0 was run."""
WRAPPED = ("_generate_and_score_completions", "_calculate_rewards", "log")
"""Methods that are replaced on the trainer, `_generate_single_turn` beside them where it generates by itself."""
READ = (
    "_generate_single_turn",
    "_get_per_token_logps_and_entropies",
    "accelerator",
    "add_callback",
    "args",
    "model",
    "num_iterations",
    "remove_callback",
    "reward_weights",
    "rollout_func",
    "state",
    "use_transformers_continuous_batching",
    "use_vllm",
)
SCORES_BYTES = 4 * 2**30
"""Of the scores that transformers keeps while it generates: 4 GiB, the KV cache of a small model."""


def trl_version() -> str:
    """Of the installed package."""
    try:
        return metadata.version("trl")
    except metadata.PackageNotFoundError as error:
        raise MissingExtra("trl is not installed: pip install 'zerodrift[trl]'") from error


def check_trainer(trainer: Any) -> None:
    """A GRPOTrainer of a known TRL that has what is wrapped and read."""
    kind = type(trainer)
    if not any(
        base.__name__ == "GRPOTrainer" and base.__module__.startswith("trl.") for base in kind.__mro__
    ):
        raise InvalidValue(
            f"{kind.__module__}.{kind.__name__} is no trl.GRPOTrainer, which is the one that can be watched; "
            "with another trainer, call zerodrift.Monitor.observe before each batch is trained on"
        )
    found = trl_version()
    if ".".join(found.split(".")[:2]) not in KNOWN or not re.fullmatch(r"\d+\.\d+(\.\d+)?", found):
        raise InvalidValue(
            f"TRL {found} is not known here; {', '.join(KNOWN)} are. Methods that are wrapped may have another meaning in it: "
            "install one of those, or a zerodrift that knows it"
        )
    missing = [name for name in (*WRAPPED, *READ) if not hasattr(trainer, name)]
    if missing:
        raise InvalidValue(
            f"{kind.__name__} of TRL {found} lacks {', '.join(missing)}; looked for {', '.join((*WRAPPED, *READ))}"
        )


def check_given(monitor: Any, sinks: Any) -> None:
    """What it is to be watched with: a sink that cannot be told anything would fail at every step, and stop nothing."""
    if monitor is not None and not isinstance(monitor, Monitor):
        raise InvalidValue(
            f"monitor is {monitor!r:.60}; give a zerodrift.Monitor, or directory= for one that writes there"
        )
    if not isinstance(sinks, Sequence):
        raise InvalidValue(f"sinks is {sinks!r:.60}; give a list of sinks")
    for place, sink in enumerate(sinks):
        if not all(callable(getattr(sink, name, None)) for name in ("emit", "close")):
            raise InvalidValue(f"sinks[{place}] is {sink!r:.60}; a sink has emit(decision) and close()")


def generates_itself(trainer: Any) -> bool:
    """Whether the trainer's own model makes the tokens, by `generate`, which reports no logprobs unless it is asked."""
    return not trainer.use_vllm and trainer.rollout_func is None


def check_generation(trainer: Any) -> None:
    """Logprobs of the tokens can be had, at a bearable price."""
    if not generates_itself(trainer):
        return
    if trainer.use_transformers_continuous_batching:
        raise InvalidValue(
            "use_transformers_continuous_batching reports no logprobs, and a gap cannot be measured without them; "
            "use vLLM, a rollout_func, or plain generation"
        )
    args = trainer.args
    rows = args.per_device_train_batch_size * args.steps_per_generation
    vocabulary = trainer.model.config.get_text_config().vocab_size
    needed = rows * args.max_completion_length * vocabulary * 4
    if needed > SCORES_BYTES:
        raise InvalidValue(
            f"plain generation would keep {needed / 2**30:.1f} GiB of scores ({rows} completions × "
            f"{args.max_completion_length} tokens × {vocabulary} ids) to report logprobs, and {SCORES_BYTES / 2**30:.0f} GiB "
            "is the most that is taken; use vLLM or a rollout_func, which report them, or smaller batches"
        )


def check_quarantine(trainer: Any, monitor: Monitor) -> None:
    """A batch can be kept from changing weights; where it cannot, only watching is offered."""
    if not monitor.config.circuit_breaker_enabled:
        return
    why = None
    if getattr(trainer, "is_deepspeed_enabled", False):
        why = "DeepSpeed steps the weights by itself"
    elif trainer.args.fp16 and not trainer.args.max_grad_norm:
        why = "the fp16 scaler cannot do without gradients unless max_grad_norm is set"
    if why is not None:
        raise InvalidValue(
            f"{why}, so a quarantined batch would still move them; watch only, with "
            "zerodrift.Monitor(MonitoringConfig(circuit_breaker_enabled=False))"
        )

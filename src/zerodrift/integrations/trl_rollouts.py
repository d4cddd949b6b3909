"""A `rollout_func` for TRL whose tokens come from an engine that runs elsewhere, with the trainer's weights of every step.

    engine = VllmBackend("http://127.0.0.1:8000", explicit=True)
    trainer = GRPOTrainer(…, rollout_func=EngineRollouts(engine, "/shared/weights"))

TRL's own way into a server needs NCCL between GPUs. Here the weights go through a directory that both sides see, before
the first generation of each step: nothing of ours is in flight then, so no token is drawn from two versions. Cached
prefixes of the weights before are not used again: each version has a salt of its own, or the cache is reset.
"""

import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from zerodrift.backends.base import Backend, Capability
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.errors import CapabilityMissing, EngineError, InvalidValue
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.integrations.trl_batch import VERSION_FIELD
from zerodrift.integrations.trl_sampling import drawn_with
from zerodrift.models.quiet import quiet

NEEDED = ("_tokenize_prompts", "accelerator", "args", "eos_token_ids", "model", "state")


class EngineRollouts:
    """Give it to `GRPOTrainer(rollout_func=…)`; it returns ids, logprobs and the weight version of every token."""

    def __init__(self, engine: Backend, exchange: str | Path) -> None:
        """`exchange`: a directory that the engine can read; what is written there is removed once it was loaded."""
        if Capability.LOAD_WEIGHTS not in engine.capabilities:
            raise CapabilityMissing(
                f"{engine.name} takes no new weights while it runs, and would draw from those of step 0 for ever; "
                "start vLLM with VLLM_SERVER_DEV_MODE=1"
            )
        if not engine.capabilities & {Capability.CACHE_SALT, Capability.RESET_CACHE}:
            raise CapabilityMissing(
                f"{engine.name} can neither salt nor reset its prefix cache, and would go on with prefixes of old weights; "
                "start vLLM with VLLM_SERVER_DEV_MODE=1"
            )
        self._engine, self._exchange = engine, Path(exchange)
        self._run = secrets.token_hex(8)
        self._pushed: tuple[object, int] | None = None
        self._salt: str | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """One completion for each prompt: TRL repeats a prompt as often as it wants samples of it."""
        sampling = _sampling(trainer)
        ids, images, more = trainer._tokenize_prompts(list(prompts))  # noqa: SLF001 - TRL has no public way to its template
        if images is not None or more:
            raise InvalidValue("prompts with images cannot be sent to an engine as token ids; use text alone")
        self._push(trainer)
        requests = [Request(Prompt(tuple(row), cache_salt=self._salt), sampling) for row in ids]
        made = [_only(answer) for answer in self._engine.generate(requests)]
        return {
            "prompt_ids": [list(each.prompt_token_ids) for each in made],
            "completion_ids": [list(each.token_ids) for each in made],
            "logprobs": [list(each.logprobs) for each in made],
            VERSION_FIELD: [self._version(each) for each in made],
        }

    def _push(self, trainer: Any) -> None:
        """Weights that the engine does not have yet; a trainer that starts anew has a state of its own."""
        state, step = trainer.state, int(trainer.state.global_step)
        if self._pushed is not None and self._pushed[0] is state and self._pushed[1] == step:
            return
        self._exchange.mkdir(parents=True, exist_ok=True)
        # An update that fails half-way leaves nobody sure of what is served: the next call sends it again.
        self._pushed = None
        with tempfile.TemporaryDirectory(dir=self._exchange, prefix=f"step-{step}-") as name, quiet():
            directory = Path(name)
            # The server may run as somebody else.
            directory.chmod(0o755)
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(directory)
            self._engine.load_weights(directory, WeightVersion(str(step)))
        if Capability.CACHE_SALT in self._engine.capabilities:
            self._salt = f"{self._run}-{step}"
        else:
            self._engine.reset_cache()
        self._pushed = (state, step)

    def _version(self, made: Completion) -> list[int] | None:
        """The step of each token's weights by the server's label, or by what was sent where it keeps none.

        None where a label is not ours: the server was started anew, or somebody else sends it weights.
        """
        if Capability.WEIGHT_VERSION not in self._engine.capabilities:
            assert self._pushed is not None
            return [self._pushed[1]] * len(made.token_ids)
        labels = [span.version.label for span in made.versions for _ in range(span.start, span.end)]
        return [int(label) for label in labels] if all(map(str.isdecimal, labels)) else None


def check_trainer(trainer: Any) -> None:
    """One process whose weights can be written down whole."""
    if missing := [name for name in NEEDED if not hasattr(trainer, name)]:
        raise InvalidValue(
            f"{type(trainer).__name__} lacks {', '.join(missing)}; TRL 1.16's GRPOTrainer has them"
        )
    if trainer.accelerator.num_processes > 1:
        raise InvalidValue(
            f"{trainer.accelerator.num_processes} processes train here, and each would push its own part of the weights; "
            "this rollout_func is for one process"
        )


def _sampling(trainer: Any) -> SamplingParams:
    check_trainer(trainer)
    sampling = drawn_with(trainer)
    if sampling is None:
        raise InvalidValue(
            f"generation_kwargs={trainer.args.generation_kwargs} ask for more than can be passed on; leave them out"
        )
    # TRL takes these for the end of a completion, whatever the server's copy of the model says.
    return msgspec.structs.replace(sampling, stop_token_ids=tuple(trainer.eos_token_ids))


def _only(answer: Answer) -> Completion:
    if answer.problems:
        problem = answer.problems[0]
        raise EngineError(f"the engine's answer cannot be trained on: [{problem.code}] {problem.message}")
    [made] = answer.completions
    return made

"""The user's task, from what is written behind `--task`: its prompts, and a reward for each rollout.

sums               ships with zerodrift: "3+4=" is to be continued by "7"
my_module:task     an object with `name`, `prompts` and `reward`, or a function of the model that gives one

A task is somebody else's code. Whatever it does wrong is told with its name and the prompt's index, and is never taken
for a fault of the engine, replaced by a number or left out.
"""

import math
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from zerodrift.audit import user_objects
from zerodrift.core.completion import Completion
from zerodrift.core.errors import ConfigError, InvalidPrompt, InvalidValue
from zerodrift.core.request import Prompt
from zerodrift.core.task import Task
from zerodrift.models.sums import Sums
from zerodrift.records.rollout import Rollout

EXAMPLES = f"{Sums.name} or my_module:task"
LARGEST_REWARD = 1e100
"""A sum of so many as fit into memory, and its square, still are numbers of float64."""


class Rewarded(NamedTuple):
    """One reward, and the prompt that it was given for."""

    prompt: int
    """Its index among the task's prompts; equal prompts have the index of the first."""
    reward: float


def open_task(spec: str, model: str | Path) -> Task:
    """The task that `spec` names, for this model."""
    if spec == Sums.name:
        return Sums(model)
    lacks = "lacks one of `name`, `prompts(count, seed)` and `reward(prompt, completion)`; see zerodrift.core.task.Task"
    task: Task = user_objects.load("task", spec, model, Task, EXAMPLES, lacks)
    return task


def prompts_of(task: Task, count: int, seed: int, vocab_size: int) -> list[Prompt]:
    """The first `count` prompts of the task, all of which the model can read."""
    try:
        prompts: list[Prompt] = list(task.prompts(count, seed))
    except Exception as error:  # as above
        raise ConfigError(f"task {task.name!r} gave no prompts: {user_objects.in_a_line(error)}") from error
    if len(prompts) != count:
        raise ConfigError(
            f"task {task.name!r} gave {len(prompts)} prompts where {count} were asked for; "
            f"--set validation.num_prompts={max(1, len(prompts))} asks for as many"
        )
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise ConfigError(
                f"task {task.name!r}: prompt {index} is a {type(prompt).__name__}; "
                "give zerodrift.core.request.Prompt, with the ids of the model's own tokenizer"
            )
        try:
            prompt.check_vocabulary(vocab_size)
        except InvalidPrompt as error:
            raise ConfigError(f"task {task.name!r}: prompt {index}: {error}") from error
    return prompts


def check_room(task: Task, prompts: Sequence[Prompt], context: int, max_tokens: int) -> None:
    """Every prompt leaves room for its answer: one that is cut off is another task's."""
    for index, prompt in enumerate(prompts):
        if len(prompt.token_ids) + max_tokens > context:
            raise ConfigError(
                f"task {task.name!r}: prompt {index} has {len(prompt.token_ids)} tokens, and with max_tokens="
                f"{max_tokens} does not fit into a context of {context}; shorten it, or lower validation.max_tokens"
            )


def rewarded(task: Task, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Rewarded]:
    """The reward of every rollout that came back; `contract` tells of those that did not."""
    index: dict[Prompt, int] = {}
    for number, prompt in enumerate(prompts):
        index.setdefault(prompt, number)
    return [
        Rewarded(
            place := index[each.request.prompt], _reward(task, place, each.request.prompt, each.completion)
        )
        for each in rollouts
        if each.completion is not None
    ]


def _reward(task: Task, index: int, prompt: Prompt, completion: Completion) -> float:
    try:
        told: Any = task.reward(prompt, completion)
    except Exception as error:  # as above
        raise InvalidValue(
            f"task {task.name!r} failed on an answer to prompt {index}: {user_objects.in_a_line(error)}"
        ) from error
    reward = _number(told)
    # NaN is within no limit.
    if not abs(reward) <= LARGEST_REWARD:
        raise InvalidValue(
            f"task {task.name!r} gave {told!r:.40} as the reward of an answer to prompt {index}; "
            f"a reward is a finite number, at most {LARGEST_REWARD:g} in size"
        )
    return reward


def _number(told: Any) -> float:
    """NaN for what is none. A bool is one, 0 or 1: `return text == answer` is how verifiers end."""
    try:
        return float(told) if isinstance(told, Real) else math.nan
    except OverflowError:  # an int of more than 308 digits
        return math.nan

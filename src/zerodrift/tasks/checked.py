"""A task by its name, and what it says, checked: its prompts, and one reward for one rollout.

sums, small-sums, shown-sums   ship with zerodrift: "3+4=" is to be continued by "7"
my_module:task                 an object with `name`, `prompts` and `reward`, or a function of the model that gives one

A task is somebody else's code. Whatever it does wrong is told with its name and the prompt's index, and is never taken
for a fault of the engine, replaced by a number or left out.
"""

import math
from numbers import Real
from pathlib import Path
from typing import Any

from zerodrift.core.completion import Completion
from zerodrift.core.errors import ConfigError, InvalidPrompt, RewardFailed
from zerodrift.core.request import Prompt
from zerodrift.core.task import Task
from zerodrift.tasks import user_objects
from zerodrift.tasks.sums import ShownSums, SmallSums, Sums

BUNDLED = {each.name: each for each in (Sums, SmallSums, ShownSums)}
EXAMPLES = f"{', '.join(BUNDLED)} or my_module:task"
LARGEST_REWARD = 1e100
"""A sum of so many as fit into memory, and its square, still are numbers of float64."""


def open_task(spec: str, model: str | Path) -> Task:
    """The task that `spec` names, for this model."""
    if (bundled := BUNDLED.get(spec)) is not None:
        return bundled(model)
    lacks = "lacks one of `name`, `prompts(count, seed)` and `reward(prompt, completion)`; see zerodrift.core.task.Task"
    task: Task = user_objects.load("task", spec, model, Task, EXAMPLES, lacks)
    return task


def prompts_of(task: Task, count: int, seed: int, vocab_size: int, cure: str) -> list[Prompt]:
    """The first `count` prompts of the task, all of which the model can read; `cure` says what to do about too few, with {} in place of how many."""
    try:
        prompts: list[Prompt] = list(task.prompts(count, seed))
    except Exception as error:  # the user's code, which fails in any way it likes
        raise ConfigError(f"task {task.name!r} gave no prompts: {user_objects.in_a_line(error)}") from error
    if len(prompts) != count:
        raise ConfigError(
            f"task {task.name!r} gave {len(prompts)} prompts where {count} were asked for; {cure.format(max(1, len(prompts)))}"
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


def reward_of(task: Task, index: int, prompt: Prompt, completion: Completion) -> float:
    """One finite number."""
    try:
        told: Any = task.reward(prompt, completion)
    except Exception as error:  # as above
        raise RewardFailed(
            f"task {task.name!r} failed on an answer to prompt {index}: {user_objects.in_a_line(error)}"
        ) from error
    reward = _number(told)
    # NaN is within no limit.
    if not abs(reward) <= LARGEST_REWARD:
        raise RewardFailed(
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

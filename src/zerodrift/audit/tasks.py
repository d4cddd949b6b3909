"""Rewards of an audit's rollouts: whether every prompt leaves room for an answer, and what each answer earned."""

from collections.abc import Sequence
from typing import NamedTuple

from zerodrift.core.errors import ConfigError
from zerodrift.core.request import Prompt
from zerodrift.core.task import Task
from zerodrift.records.rollout import Rollout
from zerodrift.tasks.checked import reward_of


class Rewarded(NamedTuple):
    """One reward, and the prompt that it was given for."""

    prompt: int
    """Its index among the task's prompts; equal prompts have the index of the first."""
    reward: float


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
            place := index[each.request.prompt],
            reward_of(task, place, each.request.prompt, each.completion),
        )
        for each in rollouts
        if each.completion is not None
    ]

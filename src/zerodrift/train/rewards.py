"""Rewards of one group, each bound to its output by id and digest; within a time, or not at all."""

import threading
from collections.abc import Sequence

from zerodrift.core.errors import RewardFailed
from zerodrift.core.request import Prompt
from zerodrift.core.task import Task
from zerodrift.engine.output import Output
from zerodrift.monitor.rewards import BoundReward
from zerodrift.tasks.checked import reward_of
from zerodrift.train.records import output_id


def rewards_of(
    task: Task, index: int, prompt: Prompt, outputs: Sequence[Output], timeout_s: float
) -> tuple[BoundReward, ...]:
    """One for each output. A function that hangs cannot be ended: it is left behind, and the run stops."""
    found: list[BoundReward] = []
    failed: list[BaseException] = []

    def score() -> None:
        try:
            found.extend(
                BoundReward(*output_id(output), reward_of(task, index, prompt, output)) for output in outputs
            )
        except BaseException as error:  # told to the thread that waits
            failed.append(error)

    # A daemon: one that hangs must not keep the process from ending.
    thread = threading.Thread(target=score, name=f"zerodrift-reward-{index}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise RewardFailed(
            f"task {task.name!r} gave no rewards for the answers to prompt {index} within {timeout_s:g} s; nothing was "
            "trained on: mend it, or raise train.reward_timeout_s"
        )
    if failed:
        raise failed[0]
    return tuple(found)

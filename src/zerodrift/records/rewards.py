"""What a task's rewards were, run by run: a file of JSON lines that the next run is compared with.

    {"task": "sums", "mean": 0.945, "std": 0.11, "n": 100, "when": "2026-11-15T09:30:00+00:00"}

A value is the mean reward of one prompt's answers, and `n` counts prompts: answers to one prompt move together, and
counted one by one they would promise more than they know.
"""

from pathlib import Path

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue, RecordError
from zerodrift.records.codec import LineWriter, read_lines

LARGEST = 1e100
"""As for a single reward: the square of it, summed over a history, is still a number."""


class Rewards(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run's rewards of one task, in four numbers and a date."""

    task: str
    mean: float
    std: float
    """Between prompts, with n - 1 below."""
    n: int
    when: str
    """For people; by custom a date of ISO 8601."""

    def __post_init__(self) -> None:
        """Numbers that no run can have are refused by the line that holds them."""
        if not self.task:
            raise InvalidValue("task is an empty string; name the task that gave the rewards")
        require.real(InvalidValue, "mean", self.mean, f"it is at most {LARGEST:g} in size", -LARGEST, LARGEST)
        require.real(InvalidValue, "std", self.std, f"it lies between 0 and {LARGEST:g}", 0, LARGEST)
        require.whole(InvalidValue, "n", self.n, "it counts prompts, and one alone has no spread", 2)


def read_history(path: Path) -> tuple[Rewards, ...]:
    """Every run in `path`, oldest first."""
    runs = tuple(read_lines(path, Rewards)) if path.is_file() else ()
    if not runs:
        raise RecordError(
            f"there is no history in {path}; leave --history out this once, and --record {path} starts one"
        )
    return runs


def append(path: Path, rewards: Rewards) -> bool:
    """Add a line, and say so; one that is there already, as after a repeated command, stays single."""
    if path.exists() and rewards in read_lines(path, Rewards):
        return False
    with LineWriter[Rewards](path) as writer:
        writer.write(rewards)
    return True

"""Are a task's rewards still what they were? This run against a recorded history of earlier ones.

The comparison sees what an audit cannot, for there engine and reference change together: another checkpoint, other
prompts, a verifier that was edited. It names none of them, and says whether the engine can be one.
"""

from pathlib import Path
from typing import NamedTuple

from zerodrift.core.errors import RecordError
from zerodrift.records.preflight import Item, PreflightRecord, Status, read_preflight
from zerodrift.records.rewards import Rewards, read_history
from zerodrift.stats.summaries import Shift, Summary, mean_shift, merged

NAME = "history"
FAILS = 1e-4
"""As for engine against reference: one healthy run in thousands (see `stats.summaries`)."""
WARNS = 0.01
"""One healthy run in a hundred is looked at twice."""
_WHOSE = {
    Status.PASS: "engine and reference agree, so weights, sampling, prompts or the task are not those of then",
    Status.FAIL: "engine and reference do not agree either: mend that first",
}
LEAST_PROMPTS = 20
"""Of fewer, the test is nobody's: that is where it was tried."""


class RewardHistory(NamedTuple):
    """Earlier runs of one task, and where they were read."""

    path: Path
    runs: tuple[Rewards, ...]

    def check_task(self, task: str) -> None:
        """Every run is of `task`."""
        for number, run in enumerate(self.runs, start=1):
            if run.task != task:
                raise RecordError(
                    f"{self.path}, line {number}: rewards of task {run.task!r}, and the configuration's is "
                    f"{task!r}; keep one file per task"
                )


def open_history(path: Path) -> RewardHistory:
    """A file that `--record` wrote, or the directory of an earlier preflight."""
    if not path.is_dir():
        return RewardHistory(path, read_history(path))
    rewards = read_preflight(path).rewards
    if rewards is None:
        raise RecordError(f"{path} is a preflight without rewards; name one whose configuration has a task")
    return RewardHistory(path, (rewards,))


def history_item(now: Rewards, runs: tuple[Rewards, ...], rewards: Status) -> Item:
    """`now` against `runs`, of which there is one at least; `rewards` is how engine and reference compared in this one."""
    then = merged([Summary(run.mean, run.std, run.n) for run in runs])
    shift = mean_shift(Summary(now.mean, now.std, now.n), then)
    facts: dict[str, float | int | str | bool] = {
        "task": now.task,
        "engine_mean": now.mean,
        "engine_prompts": now.n,
        "history_mean": then.mean,
        "history_prompts": then.n,
        "history_runs": len(runs),
        "history_from": runs[0].when,
        "history_to": runs[-1].when,
        "difference": shift.difference,
        "difference_low": shift.low,
        "difference_high": shift.high,
        "p": shift.p_value,
    }
    status, message, typed = _judged(now, then, shift)
    if status is Status.FAIL and rewards in _WHOSE:
        message = f"{message}; {_WHOSE[rewards]}"
    return Item(name=NAME, status=status, message=message, facts=facts, type=typed)


def _judged(now: Rewards, then: Summary, shift: Shift) -> tuple[Status, str, tuple[str, ...]]:
    """The answer, why, and what to type."""
    if (few := min(now.n, then.n)) < LEAST_PROMPTS:
        message = f"{few} prompts have rewards now or then, and {LEAST_PROMPTS} are needed to compare"
        return Status.INCONCLUSIVE, message, (f"validation.num_prompts: {LEAST_PROMPTS} or more",)
    if shift.spread == 0 and shift.difference == 0:
        message = (
            f"every reward is {now.mean:.4g}, now and then: what is never or always solved tells nothing"
        )
        return Status.INCONCLUSIVE, message, ("validation.task: one that is solved only sometimes",)
    message = (
        f"mean reward {now.mean:.3g} over {now.n} prompts, {then.mean:.3g} over {then.n} in the history: "
        f"difference {shift.difference:+.2g} [{shift.low:+.2g}, {shift.high:+.2g}], p = {shift.p_value:.2g}"
    )
    if shift.p_value < FAILS:
        return (
            Status.FAIL,
            message,
            ("find what changed since then; --record another file where it was meant to",),
        )
    if shift.p_value < WARNS:
        often = f"{message}, which one healthy run in {1 / shift.p_value:.0f} shows"
        return Status.WARN, often, ("validation.seed: another number, and once more",)
    return Status.PASS, message, ()


def why_not_recorded(record: PreflightRecord, *, to_the_same: bool) -> str | None:
    """What keeps a run out of a history; None where nothing does.

    Rewards of an engine that is not the reference would be what the next engine is held against. A history that the
    run does not fit stays as it is; `to_the_same` where that is the one to add to.
    """
    status = {item.name: item.status for item in record.items}
    for name in ("audit", "rewards"):
        if status[name] is not Status.PASS:
            return f"{name} is {status[name]}"
    if to_the_same and status[NAME] is Status.FAIL:
        return "the run does not fit what is in it; record another file where the change was meant"
    return None

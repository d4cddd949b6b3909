"""One checkpoint for each step of a dump: a policy moves while it is trained, and each step has weights of its own.

ckpt/step_{step}            the weights that should have made the rollouts of that step
ckpt/step_{step-1}          where a trainer saves after the update, and numbers from the step that it belongs to
ckpt/global_step_{step:06}  with as many digits
"""

import re
from collections.abc import Sequence
from glob import escape, glob
from pathlib import Path
from typing import NamedTuple

from zerodrift.core.errors import ConfigError, ModelNotFound, RecordError
from zerodrift.records.recorded import RecordedRollout

_FIELD = re.compile(r"\{step(?P<shift>[+-]\d+)?(?::0(?P<width>\d+)d?)?\}")
MOST_NAMED = 12
"""Checkpoints that are named where one is missing; their number is always told."""


class Checkpoints(NamedTuple):
    """Directories that differ in the step that stands in their path."""

    pattern: str

    def at(self, step: int) -> Path:
        """Where the checkpoint of `step` should be."""

        def number(match: re.Match[str]) -> str:
            return f"{step + int(match['shift'] or 0):0{match['width'] or 1}d}"

        return Path(_FIELD.sub(number, self.pattern))

    def found(self) -> list[Path]:
        """What there is, in the order of the steps."""
        parts = _FIELD.split(self.pattern)[:: _FIELD.groups + 1]
        numbers = re.compile("([0-9]+)".join(re.escape(part) for part in parts))
        there = glob("*".join(escape(part) for part in parts))  # noqa: PTH207 (absolute patterns)
        numbered = {path: numbers.fullmatch(path) for path in there}
        steps = {path: int(match[1]) for path, match in numbered.items() if match is not None}
        return [Path(path) for path in sorted(steps, key=lambda path: (steps[path], path))]

    def first(self) -> Path:
        """Any of them, by which a dump can be read before its steps are known."""
        if not (there := self.found()):
            raise ModelNotFound(
                f"no directory is named {self.pattern} with a number for the step; give the checkpoints' common path"
            )
        return there[0]

    def of(self, rollouts: Sequence[RecordedRollout]) -> dict[int, Path]:
        """The checkpoint of every step in `rollouts`; one that is missing is refused by name."""
        if (silent := next((each for each in rollouts if each.step is None), None)) is not None:
            raise RecordError(
                f"{silent.source}, line {silent.line}: states no step, so that {self.pattern} names no checkpoint for it; "
                "write steps into the dump, or give one checkpoint"
            )
        steps = sorted({each.step for each in rollouts if each.step is not None})
        places = {step: self.at(step) for step in steps}
        if missing := [step for step, place in places.items() if not place.is_dir()]:
            raise ModelNotFound(
                f"step {missing[0]} has no checkpoint {places[missing[0]]}{_others(missing[1:])}; there "
                f"{self._there()}. Save one for each step, or judge the steps that have one with --steps"
            )
        return places

    def _there(self) -> str:
        names = [str(path) for path in self.found()]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        told = ", ".join(names[:MOST_NAMED])
        return f"is {told}" if len(names) == 1 else f"are {told}{more}" if names else "is none"


def per_step(model: str) -> Checkpoints | None:
    """What `--model` names, where it is a path with a place for the step; None where it is one checkpoint."""
    if _FIELD.search(model):
        return Checkpoints(model)
    if "{" in model and not Path(model).exists():
        raise ConfigError(
            f"--model is {model!r}; write {{step}} where the step stands in the path, as in 'ckpt/step_{{step}}', "
            "{step-1} for the checkpoint before, {step:06} for six digits"
        )
    return None


def _others(missing: Sequence[int]) -> str:
    return f" (nor have {len(missing)} further steps)" if missing else ""

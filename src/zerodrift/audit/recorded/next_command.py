"""What to type where there was no verdict: the same command with what was missing, in a directory of its own."""

import shlex
from typing import NamedTuple

from zerodrift.audit.decide import Decision
from zerodrift.audit.recorded.conclude import Parameters
from zerodrift.audit.recorded.reading import as_options
from zerodrift.audit.recorded.sides import Sides
from zerodrift.config.precision import Precision
from zerodrift.records.verdict import Outcome, Probe


class ToType(NamedTuple):
    """A command, and when it is the right one."""

    label: str
    command: str


def commands(
    reproduce: str, decision: Decision, sides: Sides, parameters: Parameters, theirs: str | None = None
) -> tuple[ToType, ...]:
    """Each can be typed as it stands; the last is the strictest. None where nothing is known that would help.

    `theirs`: the checkpoint that made the rollouts, where --model was another.
    """
    if not reproduce or decision.verdict is not Outcome.INCONCLUSIVE:
        return ()
    if theirs is not None:
        return (ToType("judge them by their checkpoint", _judged_by(theirs, reproduce)),)
    if decision.unstated and (options := as_options(parameters.to_state)):
        return (ToType("if this was requested", reproduce + options),)
    asked = [each.overall for each in (sides.engine, sides.trainer) if each is not None]
    # Where too little was there to compare, no precision helps.
    waiting = [each for each in asked if each.status is Outcome.INCONCLUSIVE and not each.vacuous]
    if not waiting or decision.unstated:
        return ()
    who = " and the ".join("trainer" if each.probe is Probe.TRAINER else "engine" for each in waiting)
    return tuple(
        ToType(f"if the {who} computed in {precision}", f"{reproduce} --precision {precision}")
        for precision in (Precision.BF16, Precision.FP32)
    )


def _judged_by(model: str, command: str) -> str:
    """The same command with `model` as the checkpoint, and none from before."""
    kept, words = list[str](), iter(shlex.split(command))
    for word in words:
        option, given, _ = word.partition("=")
        if option not in ("--model", "--previous"):
            kept.append(word)
        elif not given:
            next(words, None)
    return shlex.join([*kept, "--model", model])

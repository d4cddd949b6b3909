"""What happens when the breaker opens, as callables of the user's: the monitor stops nothing by itself."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.decision import Code, Decision, Reason, State


@dataclass(frozen=True)
class Actions:
    """Called with the decision, in this order, when the state is entered; each may be left out."""

    quarantine: Callable[[Decision], object] | None = None
    """For every batch that must not be trained on."""
    pause_engine: Callable[[Decision], object] | None = None
    """At a halt."""
    stop_trainer: Callable[[Decision], object] | None = None
    """At a halt."""
    fall_back: Callable[[str], object] | None = None
    """At a halt, with the name of what is known to be good; if it returns, the breaker is half open."""
    known_good: str | None = None
    """An engine or a profile."""

    def __post_init__(self) -> None:
        """A fall-back needs somewhere to fall, and all are called with one argument: at a halt, hours later, is too late to find out."""
        for name in ("quarantine", "pause_engine", "stop_trainer", "fall_back"):
            call = getattr(self, name)
            if call is not None and not _takes_one(call):
                told = "the name of what is known to be good" if name == "fall_back" else "the decision"
                raise InvalidValue(f"{name} is {call!r:.60}; give something that can be called with {told}")
        if (self.fall_back is None) != (self.known_good is None):
            raise InvalidValue(
                "fall_back and known_good go together: what to call, and the name to call it with"
            )


def _takes_one(call: object) -> bool:
    if not callable(call):
        return False
    try:
        inspect.signature(call).bind(None)
    except TypeError:
        return False
    except ValueError:
        # Of some builtins nobody knows.
        return True
    return True


@dataclass(frozen=True)
class Acted:
    """What came of it."""

    fell_back: bool = False
    failed: tuple[Reason, ...] = ()
    leave: SystemExit | None = None
    """One of them ends the program, as `sys.exit` does: once all have run, and the decision was told."""


def act(actions: Actions, decision: Decision, *, entered_halt: bool) -> Acted:
    """Call what this state calls for; one that fails is reported, and keeps none of the others from running."""
    names = ["quarantine"] if decision.state in {State.QUARANTINE, State.HALT} else []
    names += ["pause_engine", "stop_trainer", "fall_back"] if entered_halt else []
    failed, done, leave = [], set(), None
    for name in names:
        call = getattr(actions, name)
        if call is None:
            continue
        try:
            call(actions.known_good if name == "fall_back" else decision)
            done.add(name)
        except SystemExit as asked:
            leave = asked
        # A user's callable may raise anything, and the others must still run.
        except Exception as error:
            failed.append(Reason(code=Code.ACTION_FAILED, message=f"{name} failed: {error!r}", where=name))
    return Acted("fall_back" in done, tuple(failed), leave)

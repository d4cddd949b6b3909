"""What happens when the breaker opens, as callables of the user's: the monitor stops nothing by itself."""

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
        """A fall-back needs somewhere to fall."""
        if (self.fall_back is None) != (self.known_good is None):
            raise InvalidValue(
                "fall_back and known_good go together: what to call, and the name to call it with"
            )


@dataclass(frozen=True)
class Acted:
    """What came of it."""

    fell_back: bool = False
    failed: tuple[Reason, ...] = ()


def act(actions: Actions, decision: Decision, *, entered_halt: bool) -> Acted:
    """Call what this state calls for; one that fails is reported, and keeps none of the others from running."""
    names = ["quarantine"] if decision.state in {State.QUARANTINE, State.HALT} else []
    names += ["pause_engine", "stop_trainer", "fall_back"] if entered_halt else []
    failed, done = [], set()
    for name in names:
        call = getattr(actions, name)
        if call is None:
            continue
        try:
            call(actions.known_good if name == "fall_back" else decision)
            done.add(name)
        # A user's callable may raise anything, and the others must still run.
        except Exception as error:
            failed.append(Reason(code=Code.ACTION_FAILED, message=f"{name} failed: {error!r}", where=name))
    return Acted("fall_back" in done, tuple(failed))

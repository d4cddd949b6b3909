"""One request and one of the completions it got, as it stands in `rollouts.jsonl`."""

import msgspec

from zerodrift.core import require
from zerodrift.core.completion import Completion, Problem
from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import Request


class Rollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sampled sequence with what was asked for; `problem` where none could be read."""

    index: int
    """Of the request in the run's plan; a resumed run skips those it finds."""
    group: str
    """Which part of the plan it belongs to."""
    request: Request
    completion: Completion | None = None
    problem: Problem | None = None
    source: str = "engine"
    """Who sampled it: `engine` or `reference`."""

    def __post_init__(self) -> None:
        """A rollout without an outcome would be one dropped in silence."""
        require.whole(InvalidValue, "rollout index", self.index, "it counts requests from 0", 0)
        require.instance(InvalidValue, "request", self.request, Request)
        require.instance(InvalidValue, "completion", self.completion, Completion | None)
        require.instance(InvalidValue, "problem", self.problem, Problem | None)
        if (self.completion is None) == (self.problem is None):
            both = "neither" if self.completion is None else "both"
            raise InvalidValue(f"rollout {self.index} has {both}; it is a completion or a problem")

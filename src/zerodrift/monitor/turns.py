"""Threads take turns: a watchdog's alert while a batch is judged, or two scorers at once, and each decision is of all before it."""

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, TypeVar

T = TypeVar("T")


def by_turns(kind: type[T]) -> type[T]:
    """Of an object's public methods one runs at a time. The thread that runs it may call another: an action may open the breaker."""
    for name, method in list(vars(kind).items()):
        if callable(method) and not name.startswith("_"):
            setattr(kind, name, _alone(method))
    return kind


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.__dict__.setdefault("_turn", RLock()):
            return method(self, *args, **kwargs)

    return called

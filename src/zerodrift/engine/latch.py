"""A flag to wait for, which no waiter can keep from being set."""

import queue
from contextlib import suppress


class Latch:
    """Set once, and waited for by any number of threads.

    Whoever waits for a `threading.Event` or a `Future` holds its lock for some lines. A signal handler that runs in one of
    them, and waits for the thread that is about to set it, would wait for ever. A SimpleQueue's `put` takes no lock.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        """Whether waiting is over."""
        return self._is_set

    def set(self) -> None:
        """Wake everybody."""
        self._is_set = True
        self._wakes.put(None)

    def wait(self, timeout: float) -> bool:
        """Until it is set, `timeout` seconds at most; whether it is."""
        if not self._is_set:
            with suppress(queue.Empty):
                self._wakes.get(timeout=timeout)
                self._wakes.put(None)  # for the next one
        return self._is_set

"""Requests that are to be scored, held with what comes of their answers: of all together no more than there is room for. Torch-free."""

import threading
from typing import NamedTuple

from zerodrift.serve.shadow.samples import Passed

ANSWER_BYTES = 32 * 2**20
"""Of one answer."""
ROOM_BYTES = 256 * 2**20
"""For all that were chosen, in flight or waiting for their turn."""


class KeptRoom:
    """How much of it is taken. Any thread."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._taken = 0

    def take(self, size: int) -> bool:
        """False: there is no room for it."""
        with self._mutex:
            fits = self._taken + size <= ROOM_BYTES
            self._taken += size if fits else 0
        return fits

    def give_back(self, size: int) -> None:
        """Of what was taken."""
        with self._mutex:
            self._taken -= size


class KeptCall(NamedTuple):
    """What is scored, and how much room it takes until then."""

    passed: Passed
    size: int


class ChosenCall:
    """One of them, until it is handed over or forgotten."""

    def __init__(self, path: str, asked: bytes, room: KeptRoom) -> None:
        """Room for `asked` is taken already."""
        self.left_out: str | None = None
        """Why nothing is kept of it."""
        self._path, self._asked, self._answered = path, asked, bytearray()
        self._room, self._size = room, len(asked)

    def add(self, piece: bytes) -> None:
        """Some of the answer."""
        if self.left_out is not None:
            return
        if len(self._answered) + len(piece) > ANSWER_BYTES:
            self.left_out = "too-large"
        elif not self._room.take(len(piece)):
            self.left_out = "busy"
        else:
            self._answered += piece
            self._size += len(piece)
            return
        self.forget()

    def hand_over(self, *, streamed: bool) -> KeptCall:
        """All that was kept. Whoever gets it gives its room back."""
        kept = KeptCall(Passed(self._path, self._asked, bytes(self._answered), streamed), self._size)
        self._asked, self._answered, self._size = b"", bytearray(), 0
        return kept

    def forget(self) -> None:
        """Nothing is kept of what was not handed over."""
        self._asked, self._answered = b"", bytearray()
        self._room.give_back(self._size)
        self._size = 0

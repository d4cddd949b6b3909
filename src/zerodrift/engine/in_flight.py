"""Blocks that nobody holds any more, and that a step in flight may still write to: given back when that step has landed."""

from collections import deque

from zerodrift.engine.blocks import BlockPool


class InFlight:
    """Steps between plan and commit, oldest first; what is released meanwhile waits for the youngest."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._released: deque[list[int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._released)

    @property
    def due(self) -> list[int]:
        """All that waits."""
        return [block for blocks in self._released for block in blocks]

    def begin(self) -> None:
        """Another step was planned."""
        self._released.append([])

    def landed(self) -> None:
        """The oldest step, if there is one, writes no more."""
        if self._released:
            self._pool.release(self._released.popleft())

    def release(self, blocks: list[int]) -> None:
        """As soon as nothing in flight knows them."""
        if self._released:
            self._released[-1] += blocks
        else:
            self._pool.release(blocks)

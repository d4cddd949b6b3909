"""Which KV blocks are taken, by how many, and which could be taken back? Numbers only; the tensors lie elsewhere.

A block is in one of three places: free (content worthless), held (one or more references), or idle (no reference,
but its content is kept for whoever asks for the same prefix). free → held → free, and held ⇄ idle → free for the
blocks that the prefix cache wants kept.
"""

from collections.abc import Iterable

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue, InvariantBroken


class BlockPool:
    """Reference counts over `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        """All blocks start free."""
        require.whole(InvalidValue, "num_blocks", num_blocks, "it counts KV blocks, one at least", 1)
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # A stack: the block freed last is the one most likely still in the processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Insertion order is the order in which blocks became idle, so the first is the least recently used.
        self._idle: dict[int, None] = {}
        self._kept: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks that can be allocated after their content is given up."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks that somebody looks at."""
        return self.num_blocks - len(self._free) - len(self._idle)

    @property
    def kept(self) -> frozenset[int]:
        """Blocks whose content outlives their last reference."""
        return frozenset(self._kept)

    def references(self, block: int) -> int:
        """How many look at `block`."""
        return self._references[block]

    def allocate(self) -> int:
        """A free block, with one reference."""
        if not self._free:
            raise InvariantBroken(
                f"none of {self.num_blocks} KV blocks is free ({self.num_idle} idle), yet one was asked for; "
                "the scheduler must evict or preempt before it allocates"
            )
        block = self._free.pop()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference; an idle block is held again."""
        if block in self._idle:
            del self._idle[block]
        elif self._references[block] == 0:
            raise InvariantBroken(f"block {block} is free, and its content cannot be shared")
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less of each. The last one makes a kept block idle, and any other free."""
        for block in blocks:
            if self._references[block] == 0:
                raise InvariantBroken(f"block {block} was released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._kept:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """The content of a held block is worth more than its references."""
        if self._references[block] == 0:
            raise InvariantBroken(f"block {block} is not held, so nobody vouches for its content")
        self._kept.add(block)

    def reclaim(self) -> int:
        """Free the least recently used idle block; its content is given up."""
        if not self._idle:
            raise InvariantBroken("no KV block is idle, so none can be reclaimed")
        block = next(iter(self._idle))
        del self._idle[block]
        self._kept.remove(block)
        self._free.append(block)
        return block

    def check(self) -> None:
        """Every block is in exactly one place, and the place agrees with its count."""
        free, idle = set(self._free), set(self._idle)
        if len(free) < len(self._free):
            raise InvariantBroken(f"the free list holds a block twice: {sorted(self._free)}")
        for block, count in enumerate(self._references):
            places = (block in free) + (block in idle) + (count > 0)
            if places != 1 or count < 0:
                raise InvariantBroken(
                    f"block {block} has {count} references, free={block in free}, idle={block in idle}; "
                    "it must be in exactly one place"
                )
        if idle - self._kept or free & self._kept:
            raise InvariantBroken(
                f"blocks {sorted(idle - self._kept)} are idle but not kept, {sorted(free & self._kept)} kept but free"
            )

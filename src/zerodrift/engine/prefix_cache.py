"""Which block already holds the KV of this prefix? Looked up by everything that the KV depends on.

The KV of a block is a function of the weights and of every token up to its end, so its key chains exactly those:
root(weights, salt) → chain(root, first block's tokens) → chain(…, second block's tokens) → … A key thus names a whole
prefix under one set of weights for one tenant: a stale or foreign hit would need a sha256 collision, and rolling
weights back makes their old entries valid again. Only full blocks have keys; they are never written again.
"""

import hashlib
from array import array
from collections.abc import Sequence

from zerodrift.core.errors import InvariantBroken
from zerodrift.engine.blocks import BlockPool


def root(weights: str, salt: str | None) -> bytes:
    """The key of the empty prefix, for one set of weights and one tenant."""
    # The length keeps ("a", "bc") from running into ("ab", "c"); no salt is not the empty salt.
    tenant = "none" if salt is None else f"salt {salt}"
    return hashlib.sha256(f"{len(weights)} {weights} {tenant}".encode(errors="surrogatepass")).digest()


def chain(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of `parent` extended by one block of tokens."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class PrefixCache:
    """Keys to blocks of `pool`, each block kept until it is the least recently used one and room is needed."""

    def __init__(self, pool: BlockPool) -> None:
        """Starts empty."""
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._block_of)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is cached. Takes no reference."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, key: bytes, block: int) -> None:
        """`block`, full and held, can be found from now on. Of two blocks with equal content the first stays."""
        if key in self._block_of:
            return
        if block in self._key_of:
            raise InvariantBroken(f"block {block} is cached under another key; a full block never changes")
        self._pool.keep(block)
        self._block_of[key] = block
        self._key_of[block] = key

    def make_room(self, num_free: int) -> None:
        """Forget idle blocks, least recently used first, until `num_free` are free or none is idle."""
        while self._pool.num_free < num_free and self._pool.num_idle:
            del self._block_of[self._key_of.pop(self._pool.reclaim())]

    def clear(self) -> None:
        """Forget every idle block. Those in use stay: their content is what their key says."""
        self.make_room(self._pool.num_blocks)

    def check(self) -> None:
        """Keys and blocks are each other's inverse, and the pool keeps exactly the blocks that can be found."""
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            raise InvariantBroken(
                f"the prefix cache maps {len(self._block_of)} keys to {len(self._key_of)} blocks inconsistently"
            )
        if self._pool.kept != self._key_of.keys():
            raise InvariantBroken(
                f"the pool keeps blocks {sorted(self._pool.kept)}, but the prefix cache knows {sorted(self._key_of)}"
            )

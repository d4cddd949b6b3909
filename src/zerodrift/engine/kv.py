"""How many KV blocks fit, and moving their content about."""

from collections.abc import Iterable
from typing import Any

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue, OutOfBlocks
from zerodrift.engine.limits import Limits
from zerodrift.engine.plan import Copy
from zerodrift.exact.paged import PagedKV

DEFAULT_BYTES = 2**30
"""Memory for keys and values unless told otherwise. Untouched pages of it cost nothing on Linux."""


def bytes_per_block(model: Any, block_size: int) -> int:
    """Memory of one block over all layers: what a pool of one block takes."""
    return PagedKV(model, 1, block_size).bytes_per_block


def blocks_in(model: Any, limits: Limits, context: int, kv_bytes: int) -> int:
    """Blocks that fit into `kv_bytes`, and not more than sequences of length `context` could ever use."""
    require.whole(InvalidValue, "kv_cache_memory_bytes", kv_bytes, "it counts bytes, one at least", 1)
    each = bytes_per_block(model, limits.block_size)
    if kv_bytes < each:
        raise OutOfBlocks(
            f"kv_cache_memory_bytes is {kv_bytes}, but one block of {limits.block_size} tokens takes {each} bytes; give "
            "more memory or smaller blocks"
        )
    return min(kv_bytes // each, limits.max_num_seqs * limits.blocks_for(context))


def copy_blocks(kv: PagedKV, copies: Iterable[Copy]) -> None:
    """In order: a block may be the source of one copy and, freed since, the target of a later one."""
    for copy in copies:
        kv.copy_block(copy.source, copy.target)

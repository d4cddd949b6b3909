"""The engine's forward: the same modules as the trainer's, with keys and values in pages.

K and V of a step's tokens are written first, then attended to, so that a token is read back the same way whether it
was written now, a step ago, or by another request whose prefix is shared. The page size decides where numbers lie,
never in which order they are added. Shapes: T tokens of the step, C kv heads, D head size, H hidden size.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from zerodrift.core.errors import InvalidValue, Unproven
from zerodrift.exact.ops.interface import HeadShape, Query
from zerodrift.exact.preparation import layers_of, ops_of, parameters_on
from zerodrift.models.family.registry import family_of

Pages = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer: [blocks, C, block_size, D]."""
ALIGNMENT = 64
"""Bytes: where torch's own allocator lets a tensor of a processor begin."""


class PagedBatch(NamedTuple):
    """One engine step, all sequences one after another."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    """Absolute."""
    slots_T: torch.Tensor
    """block · block_size + offset: where each token's K and V are written."""
    bounds: tuple[int, ...]
    """Sequence s is tokens bounds[s] to bounds[s + 1] - 1."""
    firsts: tuple[int, ...]
    """Position of each sequence's first token: known to the host, and not to be read back from the device."""
    tables: tuple[torch.Tensor, ...]
    """Per sequence: block ids that cover positions 0 to its last."""


class PagedKV:
    """Keys and values of all layers, in blocks: [num_blocks, C, block_size, D] for each layer.

    Heads stand before positions, so that gathering a head's keys of one page is one copy.
    """

    def __init__(self, model: Any, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise InvalidValue(f"{name} is {value}; a KV cache has at least one block of one token")
        config = model.config
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = family_of(model).head_dim(config)
        self.scratch = num_blocks
        """On a GPU, a block that is nobody's: rows that fill up a captured step write there."""
        spare = int(parameters_on(model).type == "cuda")
        shape = (num_blocks + spare, self.num_kv_heads, block_size, self.head_dim)
        # Zeros: a hidden value is multiplied by 0, and 0 · NaN is NaN.
        self.layers = tuple(
            (_zeros(model, shape), _zeros(model, shape)) for _ in range(config.num_hidden_layers)
        )
        self.nbytes: int = sum(part.nbytes for layer in self.layers for part in layer)
        self.bytes_per_block = self.nbytes // (num_blocks + spare)

    def rows_of(self, slots_T: torch.Tensor) -> torch.Tensor:
        """Where the heads of each token lie, token by token, among rows of D numbers."""
        blocks_T, offsets_T = slots_T // self.block_size, slots_T % self.block_size
        heads_C = torch.arange(self.num_kv_heads, device=slots_T.device)
        return (
            (blocks_T[:, None] * self.num_kv_heads + heads_C) * self.block_size + offsets_T[:, None]
        ).flatten()

    def write(self, pages: Pages, rows: torch.Tensor, new: Sequence[torch.Tensor]) -> None:
        """Put `new` keys and values [T, C, D] where `rows_of` says."""
        for part, new_TCD in zip(pages, new, strict=True):
            part.view(-1, self.head_dim).index_copy_(0, rows, new_TCD.reshape(-1, self.head_dim))

    def copy_block(self, source: int, target: int) -> None:
        """Make block `target` hold what `source` holds, in every layer."""
        for layer in self.layers:
            for part in layer:
                part[target] = part[source]


class PageStep:
    """What layers share that keep keys and values in pages: which rows are new, and who reads what."""

    kv: PagedKV
    rows: torch.Tensor
    plan: Any

    def attend(
        self,
        ops: Any,
        layer_index: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        shape: HeadShape,
    ) -> torch.Tensor:
        """Write, then read."""
        q_THD, *new = qkv
        pages = self.pages(layer_index)
        self.kv.write(pages, self.rows, new)
        out_THD: torch.Tensor = ops.attend_paged(q_THD, pages, self.plan, shape)
        return out_THD

    def pages(self, layer_index: int) -> Pages:
        """Keys and values of a layer, to be written to and read."""
        return self.kv.layers[layer_index]


class PagedStep(PageStep):
    """One forward over a batch, worked out before it."""

    def __init__(self, model: Any, batch: PagedBatch, kv: PagedKV) -> None:
        _check(batch, kv)
        self.batch, self.kv = batch, kv
        self.rows = kv.rows_of(batch.slots_T)
        self.fresh = batch.slots_T[:0]
        if ops_of(model).reads_unwritten:
            self.fresh = batch.slots_T[batch.slots_T % kv.block_size == 0] // kv.block_size
        queries = [
            Query(begin, end, first, table.to(kv.layers[0][0].device))
            for begin, end, first, table in zip(
                batch.bounds[:-1], batch.bounds[1:], batch.firsts, batch.tables, strict=True
            )
        ]
        windows = set(family_of(model).windows(model.config))
        self.plan = ops_of(model).plan(queries, kv.block_size, kv.num_kv_heads, windows)

    def pages(self, layer_index: int) -> Pages:
        # A block that changes hands may hold a NaN of its last owner beyond what is written now.
        if len(self.fresh):
            self.kv.layers[layer_index][1].index_fill_(0, self.fresh, 0)
        return self.kv.layers[layer_index]


def forward_paged(model: Any, batch: PagedBatch, kv: PagedKV) -> torch.Tensor:
    """Hidden states [T, H] after the final norm."""
    return forward_step(model, PagedStep(model, batch, kv))


@torch.no_grad()
def forward_step(model: Any, step: PagedStep) -> torch.Tensor:
    """As above, of a step that is planned. Writes K and V of its tokens, then attends."""
    return forward_tokens(model, step.batch.token_ids_T, step.batch.positions_T, step)


@torch.no_grad()
def forward_tokens(
    model: Any, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: Any
) -> torch.Tensor:
    """As above, of tokens that lie where `step` says: by fused layers where the device has them, else by the modules."""
    layers = layers_of(model)
    with ops_of(model).computing(), torch.autocast(token_ids_T.device.type, enabled=False):
        if layers is None:
            return _by_modules(model, token_ids_T, positions_T, step)
        hidden_TH: torch.Tensor = layers(token_ids_T, positions_T, step)
        if layers.to_prove(len(token_ids_T)):
            own_TH = _by_modules(model, token_ids_T, positions_T, step)
            if (rows := int((hidden_TH != own_TH).any(-1).sum())) > 0:
                raise Unproven(
                    f"the fused layers give other bits than the model's own in {rows} of {len(own_TH)} rows on this "
                    "device; report its name and the versions of torch and triton"
                )
    return hidden_TH


def _by_modules(model: Any, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: Any) -> torch.Tensor:
    output = model.model(
        input_ids=token_ids_T[None], position_ids=positions_T[None], use_cache=False, exact_step=step
    )
    hidden_TH: torch.Tensor = output.last_hidden_state[0]
    return hidden_TH


def _check(batch: PagedBatch, kv: PagedKV) -> None:
    count = len(batch.token_ids_T)
    if not (
        batch.bounds[0] == 0
        and batch.bounds[-1] == count == len(batch.positions_T) == len(batch.slots_T)
        and len(batch.tables) == len(batch.firsts) == len(batch.bounds) - 1
        and all(begin < end for begin, end in pairwise(batch.bounds))
    ):
        raise InvalidValue(
            f"a batch of {count} tokens, {len(batch.positions_T)} positions, {len(batch.slots_T)} slots and "
            f"{len(batch.tables)} tables has {len(batch.firsts)} first positions and bounds {batch.bounds[:8]}…; each "
            "sequence needs at least one token"
        )
    sizes = [end - begin for begin, end in pairwise(batch.bounds)]
    for index, (first, size, table) in enumerate(zip(batch.firsts, sizes, batch.tables, strict=True)):
        last = first + size - 1
        if len(table) * kv.block_size <= last:
            raise InvalidValue(
                f"sequence {index} reaches position {last}, but its table of {len(table)} blocks of {kv.block_size} "
                f"covers {len(table) * kv.block_size}"
            )


def _zeros(model: Any, shape: tuple[int, ...]) -> torch.Tensor:
    device = parameters_on(model)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=model.dtype, device=device)
    # `torch.zeros` writes every byte: 3.9 s for the 1 GiB of an engine that will touch a hundredth of it. The system's
    # own zeros come with the first touch of a page. Aligned as torch's are: bits were proven on such memory.
    nbytes = math.prod(shape) * model.dtype.itemsize
    raw = torch.from_numpy(np.zeros(nbytes + ALIGNMENT, np.uint8))
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + nbytes].view(model.dtype).view(shape)

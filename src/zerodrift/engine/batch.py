"""A plan as the tensors that a paged forward takes. Shapes: T tokens of the step."""

from array import array

import torch

from zerodrift.engine.plan import StepPlan
from zerodrift.exact.paged import PagedBatch


def paged_batch(plan: StepPlan, block_size: int, device: torch.device) -> PagedBatch:
    """All slices one after another, in the order of the plan."""
    token_ids, positions, slots, tables = array("q"), array("q"), array("q"), array("q")
    bounds, table_sizes = [0], []
    for part in plan.slices:
        token_ids.extend(part.token_ids)
        positions.extend(range(part.start, part.end))
        slots.extend(
            part.blocks[position // block_size] * block_size + position % block_size
            for position in range(part.start, part.end)
        )
        tables.extend(part.blocks)
        table_sizes.append(len(part.blocks))
        bounds.append(len(token_ids))
    return PagedBatch(
        _tensor(token_ids, device),
        _tensor(positions, device),
        _tensor(slots, device),
        tuple(bounds),
        tuple(part.start for part in plan.slices),
        # One tensor for all tables, cut into views: 256 small ones cost ten times as much to make.
        torch.split_with_sizes(_tensor(tables, device), table_sizes),
    )


def _tensor(values: "array[int]", device: torch.device) -> torch.Tensor:
    return torch.frombuffer(values, dtype=torch.int64).to(device)

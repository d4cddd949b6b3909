"""Is a row's result the same bits, whoever computes beside it? Asked of every op before it is used.

A few rows are computed once on one thread, among 64: those bits are the row's own. An op holds for a number of rows and
threads if a call of just that shape, filled with copies of these rows, gives each of them its own bits. So two
processes with different batches and threads, which both asked, agree with each other. Nothing is inferred from one
shape to another, and nothing that fails is used: `Unproven` is raised.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from zerodrift.core.errors import Unproven

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 33, 64)
"""Row counts around which libraries change kernels: what is asked before a model runs at all."""
SAMPLE = 17
"""Rows that are told apart. Odd, so that in a large call each of them stands at every place of a vector."""
AMONG = 64
Rows = Callable[[torch.Tensor], torch.Tensor]


class Reference(NamedTuple):
    """Some rows, and the bits that are theirs."""

    rows_P: torch.Tensor
    expected_P: torch.Tensor


def hard(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows on which any other order of summation shows: 24 binary orders of magnitude, and neighbours that cancel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, (rows, columns), generator=generator).float())
    # Half of the pairs cancel but for their last bits.
    pairs = x[:, : columns // 2 * 2].view(rows, -1, 2)
    cancel = torch.rand(rows, pairs.shape[1], generator=generator) < 0.5
    pairs[..., 1] = torch.where(cancel, -pairs[..., 0] * (1 + 2.0**-20), pairs[..., 1])
    return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal down to the sign of zero and the payload of NaN."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def reference(op: Rows, rows_P: torch.Tensor) -> Reference:
    """What `op` gives each row on one thread, among 64."""
    with threads(1):
        return Reference(rows_P, op(_repeated(rows_P, AMONG))[: len(rows_P)].clone())


def holds(op: Rows, known: Reference, count: int) -> bool:
    """Whether `op` gives `count` rows at once the bits that are theirs, on the threads that there are now."""
    found = op(_repeated(known.rows_P, count))
    # Some at a time: what is expected of a large vocabulary need not be held for all rows.
    expected = _repeated(known.expected_P, min(count, AMONG * SAMPLE))
    return all(same_bits(part, expected[: len(part)]) for part in torch.split(found, len(expected)))


def require(op: Rows, columns: int, what: str, counts: Sequence[int] = COUNTS) -> None:
    """`op`, which has no other variant, holds for these numbers of rows; or `Unproven`."""
    known = reference(op, hard(SAMPLE, columns))
    if differing := [count for count in counts if not holds(op, known, count)]:
        raise unproven(what, f"when {differing} of them are computed together")


def unproven(what: str, when: str) -> Unproven:
    """The error: rows of `what` change their bits `when`."""
    number = torch.get_num_threads()
    way_out = "use one thread, or another machine" if number > 1 else "use another machine"
    return Unproven(
        f"{what}: rows change their bits {when}, on this machine with {number} threads; exact mode cannot run here: "
        f"{way_out}"
    )


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many for torch, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _repeated(rows_P: torch.Tensor, count: int) -> torch.Tensor:
    return rows_P[torch.arange(count, device=rows_P.device) % len(rows_P)]

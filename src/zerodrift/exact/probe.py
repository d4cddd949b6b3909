"""Is a row's result the same bits, whoever computes beside it? Asked of every op and shape before it is used.

An op passes if each row of a large call comes out bit for bit when it is computed among fewer rows, at another place,
or by another number of threads. The reference is always the large call on one thread, so that two processes with
different thread counts which both passed agree with each other. Nothing that fails is used: `Unproven` is raised.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zerodrift.core.errors import Unproven

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 33, 64)
"""Row counts around which BLAS libraries change kernels."""
Rows = Callable[[torch.Tensor], torch.Tensor]


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


def differing_counts(op: Rows, x: torch.Tensor, counts: Sequence[int] = COUNTS) -> Iterator[int]:
    """Row counts at which `op` gives some row other bits than among all rows of `x` on one thread."""
    threads = torch.get_num_threads()
    with _threads(1):
        reference = op(x)
    for number in sorted({1, threads}):
        for turn, count in enumerate((*counts, len(x))):
            # From the front and from the back in turn: a row must not care where it stands either.
            part = slice(None, count) if turn % 2 else slice(len(x) - count, None)
            with _threads(number):
                found = op(x[part].clone())
            if not same_bits(found, reference[part]):
                yield count


def least_floor(floors: Sequence[int], make: Callable[[int], Rows], x: torch.Tensor, what: str) -> int:
    """The first of `floors` with which `make(floor)` is the same for all row counts."""
    for floor in floors:
        if next(differing_counts(make(floor), x), None) is None:
            return floor
    differing = sorted(set(differing_counts(make(floors[-1]), x)))
    raise Unproven(
        f"{what}: rows change their bits with the number of rows beside them ({differing} differ even when padded to "
        f"{floors[-1]}) on this machine with {torch.get_num_threads()} threads; exact mode cannot run here: "
        f"{_way_out()}"
    )


def require_rows(op: Rows, columns: int, what: str) -> None:
    """`op`, which has no other variant, is the same for all row counts; or `Unproven`."""
    # A row of a vocabulary takes milliseconds: fewer of them.
    wide = columns > 2**14
    x, counts = hard(17 if wide else 96, columns), (1, 2, 3, 8) if wide else COUNTS
    if differing := sorted(set(differing_counts(op, x, counts))):
        raise Unproven(
            f"{what}: rows change their bits when {differing} of them are computed together, on this machine with "
            f"{torch.get_num_threads()} threads; exact mode cannot run here: {_way_out()}"
        )


def _way_out() -> str:
    return "use one thread, or another machine" if torch.get_num_threads() > 1 else "use another machine"


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""A recorded reference: prompts, the reference's own samples, and its logprobs, bound to the weights by digest.

The first line of the file is the header; every other line is one row, sealed with the digest of the weights. The
ground truth then needs neither the model nor the process that made it, and cannot drift along with a training run.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from zerodrift.core import require
from zerodrift.core.completion import EngineFingerprint, check_logprobs
from zerodrift.core.errors import InvalidValue, RecordError
from zerodrift.core.request import SamplingParams
from zerodrift.records.codec import numbered_lines, read_lines
from zerodrift.records.document import of_schema

SCHEMA = "zerodrift.baseline/1"


class BaselineHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all rows have in common."""

    schema: str = SCHEMA
    model: str
    weights: str
    """Digest of the weights that made the rows."""
    prompts: str
    """Digest of the prompts, so that a resumed recording cannot mix two sets."""
    count: int
    """Rows of the finished file."""
    sampling: SamplingParams
    reference: EngineFingerprint


class BaselineRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt with one sample of the reference."""

    index: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the sampled distribution."""
    raw_logprobs: tuple[float, ...]
    """Of the model's own distribution."""
    seal: str = ""
    """Digest of the row and of the weights that made it."""

    def sealed(self, weights: str) -> "BaselineRow":
        """The row with its seal."""
        bare = msgspec.structs.replace(self, seal="")
        content = weights.encode() + msgspec.json.encode(bare)
        return msgspec.structs.replace(bare, seal=xxhash.xxh3_128_hexdigest(content))

    def __post_init__(self) -> None:
        """Every token has both numbers."""
        require.whole(InvalidValue, "row index", self.index, "it counts prompts from 0", 0)
        require.token_ids(InvalidValue, "prompt", self.prompt)
        require.token_ids(InvalidValue, "output", self.output)
        if not self.prompt:
            raise RecordError(f"row {self.index} has an empty prompt; record the baseline again")
        if not len(self.output) == len(self.logprobs) == len(self.raw_logprobs):
            raise RecordError(
                f"row {self.index} has {len(self.output)} tokens, {len(self.logprobs)} logprobs and "
                f"{len(self.raw_logprobs)} raw ones; record the baseline again"
            )
        check_logprobs("logprobs", self.logprobs)
        check_logprobs("raw_logprobs", self.raw_logprobs)


def read_header(path: Path) -> BaselineHeader:
    """The header of a recorded baseline."""
    if not path.is_file():
        raise RecordError(f"there is no baseline {path}; make one with `zerodrift baseline record`")
    _, line = next(numbered_lines(path), (1, b""))
    # A kill may have torn it, and what is left may still be JSON.
    whole = line if line.endswith(b"\n") else b""
    return of_schema(whole, BaselineHeader, SCHEMA, f"{path.name}, line 1, the header of a baseline,")


def read_rows(path: Path) -> Iterator[BaselineRow]:
    """Every row, in file order; one that was changed, or is there twice, is refused by number."""
    weights = read_header(path).weights
    seen = set[int]()
    for number, row in enumerate(read_lines(path, BaselineRow, skip=1), start=2):
        if row.sealed(weights) != row or row.index in seen:
            what = "is there already" if row.index in seen else "is not what was recorded from these weights"
            raise RecordError(
                f"{path.name}, line {number}: row {row.index} {what}; record the baseline again"
            )
        seen.add(row.index)
        yield row


def read_finished(path: Path) -> tuple[BaselineHeader, tuple[BaselineRow, ...]]:
    """Header and all rows in the order of the prompts; a recording that was not finished is refused."""
    header = read_header(path)
    rows = sorted(read_rows(path), key=lambda row: row.index)
    if [row.index for row in rows] != list(range(header.count)):
        raise RecordError(
            f"{path.name} holds {len(rows)} of {header.count} rows; repeat `zerodrift baseline record` to finish it"
        )
    return header, tuple(rows)

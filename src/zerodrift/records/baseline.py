"""A recorded reference: prompts, the reference's own samples, and its logprobs, bound to the weights by digest.

The first line of the file is the header; every other line is one row. The ground truth then needs neither the model
nor the process that made it, and cannot drift along with a training run.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from zerodrift.core.completion import EngineFingerprint, check_logprobs
from zerodrift.core.errors import RecordError, SchemaMismatch
from zerodrift.core.request import SamplingParams

SCHEMA = "zerodrift.baseline/1"


class BaselineHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all rows have in common."""

    schema: str = SCHEMA
    model: str
    weights: str
    """Digest of the weights that made the rows."""
    prompts: str
    """Digest of the prompts, so that a resumed recording cannot mix two sets."""
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

    def __post_init__(self) -> None:
        """Every token has both numbers."""
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
    with path.open("rb") as file:
        line = file.readline()
    try:
        header = msgspec.json.decode(line, type=BaselineHeader)
    except msgspec.DecodeError as error:
        raise RecordError(f"{path.name}, line 1: not the header of a baseline ({error})") from error
    if header.schema != SCHEMA:
        raise SchemaMismatch(f"{path.name} has schema {header.schema!r}, and this version reads {SCHEMA!r}")
    return header


def read_rows(path: Path) -> Iterator[BaselineRow]:
    """Every row, in file order; a bad line is refused by number."""
    decoder = msgspec.json.Decoder(BaselineRow)
    with path.open("rb") as file:
        file.readline()
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                raise RecordError(
                    f"{path.name}, line {number}: the line is torn, as after a kill; resume the recording"
                )
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, RecordError) as error:
                raise RecordError(f"{path.name}, line {number}: {error}") from error

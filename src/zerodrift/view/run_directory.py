"""What does a finished run leave to look at? The files of its directory, read strictly and without torch.

`verdict.json` must be there. Everything else may be missing, because an engine that never answered leaves no tokens;
what is there is read as what it claims to be or refused, for a page that draws a damaged file would be believed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from zerodrift.core.errors import RecordError
from zerodrift.records import tokens as token_records
from zerodrift.records.directory import read_verdict
from zerodrift.records.verdict import VerdictRecord

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_ALLOWED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("sequence", "index", "position", "token"), ("iu", np.isfinite)),
    "reported": ("f", np.isfinite),
    # Only a token that the request excludes may be infinite, and only on the reference's side.
    "contracted": ("f", lambda values: values < np.inf),
    "sigma": ("f", lambda values: np.isfinite(values) & (values > 0)),
}
LONGEST_DOCUMENT = 100_000
"""Characters of config.yaml that are shown: the shipped profiles have 4,000."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Every sampled token, ordered by sequence and then by index."""

    sequence: Ids
    index: Ids
    position: Ids
    token: Ids
    reported: Floats
    contracted: Floats
    sigma: Floats
    text: Any
    """A pyarrow column: of ten million texts only those on the page become Python strings."""

    @property
    def delta(self) -> Floats:
        """Δ = contracted − reported = log π_trainer − log π_engine; −∞ where the request excludes the token."""
        result: Floats = self.contracted - self.reported
        return result

    @property
    def possible(self) -> npt.NDArray[np.bool_]:
        """Tokens that the requested parameters allow."""
        return np.isfinite(self.contracted)

    def take(self, rows: Ids) -> "Tokens":
        """These rows, in this order."""
        arrays = {
            field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "text"
        }
        return Tokens(**arrays, text=self.text.take(rows))


class FinishedRun(NamedTuple):
    """All that the report is made of."""

    name: str
    record: VerdictRecord
    tokens: Tokens | None
    """None where nothing could be measured."""
    config: str | None
    environment: dict[str, str]
    """Facts with dotted names; empty where the file is missing."""


def read(directory: Path) -> FinishedRun:
    """Everything in `directory`."""
    return FinishedRun(
        name=directory.resolve().name,
        record=read_verdict(directory),
        tokens=_tokens(directory / "tokens.parquet"),
        config=document(directory / "config.yaml"),
        environment=json_facts(directory / "environment.json"),
    )


def _tokens(path: Path) -> Tokens | None:
    if not path.is_file():
        return None
    table = token_records.read_tokens(path)
    if set(table.column_names) != token_records.COLUMNS.keys():
        raise RecordError(
            f"{path.name} has the columns {sorted(table.column_names)} in place of "
            f"{sorted(token_records.COLUMNS)}; run the audit again"
        )
    if not table.num_rows:
        return None
    columns = {name: _column(table, name) for name in _ALLOWED}
    tokens = Tokens(**columns, text=table.column("text"))
    return tokens.take(np.lexsort((tokens.index, tokens.sequence)))


def _column(table: Any, name: str) -> Any:
    """Whole numbers or floats, as an audit writes them, without gaps."""
    column = table.column(name)
    values = column.to_numpy()
    kinds, allowed = _ALLOWED[name]
    sound = not column.null_count and values.dtype.kind in kinds
    if (wrong := values[~allowed(values)] if sound else values).size:
        raise RecordError(
            f"tokens.parquet: column {name!r} holds {column.type} with {column.null_count} gaps and {wrong[0]!r}, which "
            "no audit writes; the file was damaged or made elsewhere: run the audit again"
        )
    return values.astype(np.int64 if kinds == "iu" else np.float64)


def document(path: Path) -> str | None:
    """The text of a file of the run; None where it is missing."""
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(f"{path.name} is not UTF-8 text ({error}); restore or delete it") from error


def json_facts(path: Path) -> dict[str, str]:
    """Facts of a JSON file of the run with dotted names; none where it is missing."""
    if not path.is_file():
        return {}
    try:
        tree = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{path.name} cannot be read ({error}); restore or delete it") from error
    return dict(flattened(tree))


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of a tree by their dotted names, as text."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, str) else msgspec.json.encode(value).decode()

"""`tokens.parquet`: one row per sampled token, with both sides' numbers. Any data tool reads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zerodrift.core.errors import RecordError
from zerodrift.records.arrow import arrow
from zerodrift.records.codec import write_atomically

if TYPE_CHECKING:
    import pyarrow

COLUMNS: Mapping[str, str] = {
    "sequence": "number of the sampled sequence",
    "index": "of the token within the output",
    "position": "of the token within prompt and output",
    "token": "id",
    "text": "what the tokenizer makes of the id",
    "reported": "logprob that the engine reported",
    "contracted": "logprob that the reference computes under the requested parameters",
    "raw": "logprob that the reference computes without processing",
    "entropy": "of the distribution that should have been sampled",
    "variance": "of log p under it",
    "by_likelihood": "where in [0, 1] the draw fell, with likelier tokens first",
    "by_id": "where it fell, with tokens in the order of their ids",
    "sigma": "how far rounding alone moves this token",
}
SCHEMA = b"zerodrift.tokens/1"


def write_tokens(path: Path, columns: Mapping[str, NDArray[np.generic] | list[str]]) -> None:
    """All of COLUMNS, none other."""
    if columns.keys() != COLUMNS.keys():
        raise RecordError(f"tokens.parquet has the columns {sorted(COLUMNS)}, not {sorted(columns)}")
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise RecordError(
            f"the columns of tokens.parquet have the lengths {lengths}; each token needs one of each"
        )
    pa = arrow("tokens.parquet")
    table = pa.table({name: columns[name] for name in COLUMNS})
    table = table.replace_schema_metadata({b"schema": SCHEMA})
    content = pa.BufferOutputStream()
    pa.parquet.write_table(table, content, compression="zstd")
    write_atomically(path, memoryview(content.getvalue()))


def read_tokens(path: Path) -> "pyarrow.Table":
    """The table, after checking that it is one of ours."""
    pa = arrow("tokens.parquet")
    if not path.is_file():
        raise RecordError(f"there is no {path}; it is part of a finished audit")
    try:
        table = pa.parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path.name} is damaged ({error}); run the audit again") from error
    if (table.schema.metadata or {}).get(b"schema") != SCHEMA:
        raise RecordError(
            f"{path.name} was not written by this version of zerodrift (schema {SCHEMA.decode()})"
        )
    return table

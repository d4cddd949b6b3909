"""A sealed segment: Parquet with one row for each rollout and one row group for each batch. Any data tool reads it.

Numbers keep every bit, NaN included: a batch that is read back has the digest it was written with.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from zerodrift.core.errors import RecordError, SchemaMismatch, ZerodriftError
from zerodrift.core.request import SamplingParams
from zerodrift.records.archived import OPTIONAL_LOGPROBS, ArchivedBatch, ArchivedRollout
from zerodrift.records.arrow import arrow
from zerodrift.records.codec import BLOCK_BYTES

if TYPE_CHECKING:
    import pyarrow

SCHEMA = b"zerodrift.archive/1"
ARCHIVE = "an archive"
IDS, LOGPROBS = ("prompt_token_ids", "token_ids"), ("behavior_logprobs", *OPTIONAL_LOGPROBS)
PLAIN = ("environment", "replica", "group", "kind", "finish_reason", "digest")
_DICTIONARY = ["batch", "state", "trainer_version", "environment", "replica", "group", "sampling", "kind"]


def segment_of(batches: Iterable[tuple[str, float, ArchivedBatch]]) -> bytes:
    """The file's content: each batch with its digest and the time it came."""
    pa = arrow(ARCHIVE)
    schema, content = _schema(pa), pa.BufferOutputStream()
    # Logprobs came from 32 bits: byte by byte, half of each number is zeros.
    split = [f"{name}.list.element" for name in LOGPROBS]
    with pa.parquet.ParquetWriter(
        content, schema, compression="zstd", use_dictionary=_DICTIONARY, use_byte_stream_split=split
    ) as writer:
        for digest, archived_at, batch in batches:
            rows = [_row(digest, archived_at, batch, rollout) for rollout in batch.rollouts]
            table = pa.table({name: [row[name] for row in rows] for name in schema.names}, schema=schema)
            writer.write_table(table, row_group_size=len(rows))
    return bytes(memoryview(content.getvalue()))


def open_segment(path: Path) -> "pyarrow.parquet.ParquetFile":
    """The file, after checking that it is one of ours."""
    pa = arrow(ARCHIVE)
    try:
        file = pa.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{_shown(path)} is torn or damaged ({error})") from error
    told = (file.schema_arrow.metadata or {}).get(b"schema", b"none")
    if told != SCHEMA:
        raise SchemaMismatch(
            f"{_shown(path)} has schema {told.decode(errors='replace')}, and this version reads {SCHEMA.decode()}"
        )
    return file


def read_batch(file: "pyarrow.parquet.ParquetFile", path: Path, place: int) -> ArchivedBatch:
    """The batch in one row group."""
    return _read(file, path, place)[2]


def read_described(
    file: "pyarrow.parquet.ParquetFile", path: Path, place: int
) -> tuple[str, float, ArchivedBatch]:
    """The same, with the digest and the time that stand beside it."""
    return _read(file, path, place)


def sha256_of(path: Path) -> str:
    """Of the whole file."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            hashed.update(block)
    return hashed.hexdigest()


def _schema(pa: ModuleType) -> Any:
    text, texts = pa.string(), pa.list_(pa.string())
    span = pa.struct([("label", text), ("digest", text), ("start", pa.int64()), ("end", pa.int64())])
    return pa.schema(
        [
            ("batch", text),
            ("archived_at", pa.float64()),
            ("step", pa.int64()),
            ("state", text),
            ("reasons", texts),
            ("trainer_version", text),
            ("id", text),
            *((name, pa.list_(pa.int32())) for name in IDS),
            *((name, pa.list_(pa.float64())) for name in LOGPROBS),
            ("versions", pa.list_(span)),
            ("mask", pa.list_(pa.bool_())),
            ("reward", pa.float64()),
            ("sampling", text),
            ("stated", texts),
            *((name, text) for name in PLAIN),
        ],
        metadata={b"schema": SCHEMA},
    )


def _row(digest: str, archived_at: float, batch: ArchivedBatch, rollout: ArchivedRollout) -> dict[str, Any]:
    return {
        "batch": digest,
        "archived_at": archived_at,
        "step": batch.step,
        "state": batch.state,
        "reasons": batch.reasons,
        "trainer_version": batch.trainer_version,
        "id": rollout.id,
        **{name: getattr(rollout, name) for name in (*IDS, *LOGPROBS, "mask", "reward", *PLAIN)},
        "versions": [
            (span.version.label, span.version.digest, span.start, span.end) for span in rollout.versions
        ],
        "sampling": msgspec.json.encode(rollout.sampling).decode(),
        "stated": rollout.stated,
    }


def _read(file: "pyarrow.parquet.ParquetFile", path: Path, place: int) -> tuple[str, float, ArchivedBatch]:
    pa = arrow(ARCHIVE)
    try:
        table = file.read_row_group(place, use_threads=False)
        columns = {name: _values(pa, table.column(name).combine_chunks()) for name in _schema(pa).names}
        head = {name: columns[name][0] for name in ("step", "state", "trainer_version")}
        batch = {
            **head,
            "reasons": columns["reasons"][0],
            "rollouts": [_rollout(columns, row) for row in range(table.num_rows)],
        }
        return columns["batch"][0], columns["archived_at"][0], msgspec.convert(batch, ArchivedBatch)
    except (pa.ArrowException, OSError, KeyError, IndexError, msgspec.MsgspecError, ZerodriftError) as error:
        raise RecordError(f"{_shown(path)}, row group {place}: it is no batch ({error})") from error


def _rollout(columns: Mapping[str, Sequence[Any]], row: int) -> dict[str, Any]:
    """Fields of one rollout; what is null was not given."""
    fields = {name: columns[name][row] for name in ("id", *IDS, *LOGPROBS, "mask", "reward", *PLAIN)}
    spans = [
        {
            "version": {"label": span["label"], "digest": span["digest"]},
            "start": span["start"],
            "end": span["end"],
        }
        for span in columns["versions"][row]
    ]
    return {
        **{name: value for name, value in fields.items() if value is not None},
        "versions": spans,
        "sampling": msgspec.json.decode(columns["sampling"][row], type=SamplingParams),
        "stated": columns["stated"][row],
    }


def _values(pa: ModuleType, column: Any) -> list[Any]:
    """A column as Python values. Long lists are cut out of one flat list: ten times as fast as one by one."""
    if not pa.types.is_list(column.type) or pa.types.is_struct(column.type.value_type):
        return list(column.to_pylist())
    if not pa.types.is_primitive(column.type.value_type):
        return [None if each is None else tuple(each) for each in column.to_pylist()]
    flat = column.values.to_numpy(zero_copy_only=False).tolist()
    offsets, known = column.offsets.to_pylist(), column.is_valid().to_pylist()
    return [
        tuple(flat[begin:end]) if valid else None
        for begin, end, valid in zip(offsets[:-1], offsets[1:], known, strict=True)
    ]


def _shown(path: Path) -> str:
    return f"segments/{path.name}"

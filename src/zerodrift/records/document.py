"""One record in one JSON file: indented for people, and refused where it is of another version or cannot be read."""

from pathlib import Path
from typing import TypeVar

import msgspec

from zerodrift.core.errors import RecordError, SchemaMismatch
from zerodrift.records.codec import write_atomically

T = TypeVar("T", bound=msgspec.Struct)


class Schema(msgspec.Struct):
    """What is read of a record first."""

    schema: str


def write_document(path: Path, record: msgspec.Struct) -> Path:
    """Whole or not at all, and so that it can be read back."""
    write_atomically(path, document_content(path.name, record))
    return path


def document_content(name: str, record: msgspec.Struct) -> bytes:
    """What stands in the file `name`."""
    content = msgspec.json.encode(record)
    try:
        # NaN and infinities become null in JSON, and a verdict that cannot be read back is none.
        msgspec.json.decode(content, type=type(record))
    except msgspec.ValidationError as error:
        raise RecordError(
            f"{name} would have a number that JSON cannot carry, NaN or an infinity ({error})"
        ) from error
    return msgspec.json.format(content, indent=2) + b"\n"


def read_document(path: Path, kind: type[T], schema: str, what: str) -> T:
    """The record of a finished `what`."""
    if not path.is_file():
        raise RecordError(f"{path.parent} holds no {path.name}; it is not a finished {what}")
    return of_schema(path.read_bytes(), kind, schema, str(path))


def of_schema(content: bytes, kind: type[T], schema: str, where: str) -> T:
    """What `content` holds, of this very schema: the fields of another may be other fields."""
    try:
        told = msgspec.json.decode(content, type=Schema).schema
        if told != schema:
            raise SchemaMismatch(
                f"{where} has schema {told!r}, and this version reads {schema!r}; make it again"
            )
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{where} cannot be read: {error}") from error

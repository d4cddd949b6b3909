"""A journal: batches one after the other, each in a frame that says how long it is and what its digest is.

    frame = magic, payload length, time, SHA-256 of the payload, CRC-32 of all these; payload (the batch in msgpack)

msgpack and not JSON: it has NaN, which is why many a batch is here. A frame that is not whole ends the journal, as after a
kill, unless whole ones follow: then it was damaged later, and only it is lost.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from zerodrift.core.errors import DigestMismatch, RecordError, ZerodriftError
from zerodrift.records.archived import ArchivedBatch

MAGIC = b"ZDJ1"
_HEAD = struct.Struct("<4sQd32s")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEAD.size + _CHECK.size
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ArchivedBatch)


class Encoded(NamedTuple):
    """A batch as bytes, and the digest that it is known by."""

    payload: bytes
    digest: str


class Frame(NamedTuple):
    """A whole frame in a journal."""

    begin: int
    end: int
    archived_at: float
    digest: str
    payload: bytes


class Broken(NamedTuple):
    """Bytes of a journal that are no whole frame."""

    begin: int
    end: int
    last: bool
    """Nothing whole follows."""


def encode(batch: ArchivedBatch) -> Encoded:
    """The same bytes for the same batch, in every process."""
    payload = _ENCODER.encode(batch)
    return Encoded(payload, hashlib.sha256(payload).hexdigest())


def decode(payload: bytes, where: str) -> ArchivedBatch:
    """The batch; its types and digests are checked again."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, ZerodriftError) as error:
        raise RecordError(f"{where} is whole, and is no batch of this version ({error})") from error


def frame_of(encoded: Encoded, archived_at: float) -> bytes:
    """What is appended to a journal."""
    head = _HEAD.pack(MAGIC, len(encoded.payload), archived_at, bytes.fromhex(encoded.digest))
    return head + _CHECK.pack(zlib.crc32(head)) + encoded.payload


def write_all(handle: int, content: bytes) -> None:
    """Every byte, on the disk when this returns."""
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left) :]
    os.fsync(handle)


def read_frame(path: Path, begin: int) -> Frame:
    """The frame that begins there, or an error that names the journal."""
    with path.open("rb") as file:
        file.seek(begin)
        header = _parse(file.read(HEADER_BYTES), 0)
        payload = b"" if header is None else file.read(header[0])
    if header is None or hashlib.sha256(payload).hexdigest() != header[2]:
        raise DigestMismatch(
            f"journals/{path.name}: the batch at byte {begin} is not what was written; the others can be read"
        )
    length, archived_at, digest = header
    return Frame(begin, begin + HEADER_BYTES + length, archived_at, digest, payload)


def scan(content: bytes) -> Iterator[Frame | Broken]:
    """All that a journal holds, from the front."""
    begin = 0
    while begin < len(content):
        found = _frame_at(content, begin)
        yield found
        begin = found.end


def _frame_at(content: bytes, begin: int) -> Frame | Broken:
    header = _parse(content, begin)
    if header is not None:
        length, archived_at, digest = header
        end = begin + HEADER_BYTES + length
        payload = content[begin + HEADER_BYTES : end]
        if end <= len(content):
            if hashlib.sha256(payload).hexdigest() == digest:
                return Frame(begin, end, archived_at, digest, payload)
            return Broken(begin, end, last=end == len(content))
    following = content.find(MAGIC, begin + 1)
    while following >= 0 and _parse(content, following) is None:
        following = content.find(MAGIC, following + 1)
    return Broken(begin, len(content), last=True) if following < 0 else Broken(begin, following, last=False)


def _parse(content: bytes, begin: int) -> tuple[int, float, str] | None:
    """Length, time and digest, where a header stands there."""
    if len(content) < begin + HEADER_BYTES:
        return None
    (check,) = _CHECK.unpack_from(content, begin + _HEAD.size)
    if zlib.crc32(content[begin : begin + _HEAD.size]) != check:
        return None
    magic, length, archived_at, digest = _HEAD.unpack_from(content, begin)
    return (length, archived_at, digest.hex()) if magic == MAGIC else None

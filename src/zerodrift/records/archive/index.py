"""The index of an archive: where each batch is, what was decided about it, and what is no longer there.

SQLite in WAL mode: one writer, and readers that see whole transactions. Every commit is flushed (`synchronous=FULL`), since
it is part of what acknowledges an append.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from zerodrift.core.errors import ArchiveFull, RecordError, SchemaMismatch
from zerodrift.records.archive.layout import INDEX
from zerodrift.records.archived import ArchivedBatch, BatchState

VERSION = 1
_TABLES = """
CREATE TABLE batches (
    serial INTEGER PRIMARY KEY, digest TEXT UNIQUE NOT NULL, piece TEXT NOT NULL, place INTEGER NOT NULL,
    step INTEGER NOT NULL, state TEXT NOT NULL, reasons TEXT NOT NULL, trainer_version TEXT,
    rollouts INTEGER NOT NULL, tokens INTEGER NOT NULL, archived_at REAL NOT NULL);
CREATE INDEX batches_by_step ON batches (step);
CREATE INDEX batches_by_piece ON batches (piece);
CREATE TABLE segments (
    piece TEXT PRIMARY KEY, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, sealed_at REAL NOT NULL,
    last_at REAL NOT NULL);
CREATE TABLE removed (
    digest TEXT NOT NULL, piece TEXT NOT NULL, step INTEGER NOT NULL, state TEXT NOT NULL, rollouts INTEGER NOT NULL,
    tokens INTEGER NOT NULL, archived_at REAL NOT NULL, removed_at REAL NOT NULL, why TEXT NOT NULL);
CREATE TABLE events (at REAL NOT NULL, what TEXT NOT NULL);
"""
_ROW = "digest, piece, place, step, state, reasons, trainer_version, rollouts, tokens, archived_at"
_NO_ROOM = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}


def moment(seconds: float) -> str:
    """A time for people, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One batch, as the index has it."""

    batch: str
    """SHA-256 of its contents: what it is called."""
    piece: str
    place: int
    """Byte in a journal, row group in a segment."""
    step: int
    state: BatchState
    reasons: tuple[str, ...]
    trainer_version: str | None
    rollouts: int
    tokens: int
    archived_at: float
    """Seconds since 1970."""


class Sealed(NamedTuple):
    """A segment, as the index has it."""

    piece: str
    size: int
    sha256: str
    last_at: float
    """When its youngest batch came."""


class Location(NamedTuple):
    """Where a batch is at this moment."""

    piece: str
    place: int
    sha256: str | None
    """Of the segment; None while the piece is a journal."""


class Removed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batch that is no longer there."""

    batch: str
    piece: str
    step: int
    state: BatchState
    rollouts: int
    tokens: int
    archived_at: float
    removed_at: float
    why: str


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which batches; without a condition, all of them."""

    state: BatchState | None = None
    first: int | None = None
    last: int | None = None
    """Steps from `first` to `last`, both included."""

    @property
    def where(self) -> tuple[str, list[Any]]:
        """As SQL, with its parameters."""
        given = [("state = ?", self.state), ("step >= ?", self.first), ("step <= ?", self.last)]
        conditions = [(text, value) for text, value in given if value is not None]
        clause = " AND ".join(text for text, _ in conditions)
        return (f"WHERE {clause}" if clause else ""), [value for _, value in conditions]


EVERYTHING = Query()


class Index:
    """The tables, behind the questions that are asked of them."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        """Use `Index.to_write` or `Index.to_read`."""
        self._connection, self._path = connection, path

    @classmethod
    def to_write(cls, directory: Path) -> "Index":
        """Made where there is none yet."""
        path = directory / INDEX
        with _named(path):
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
            index = cls(connection, path)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            # 256 KiB; the usual 4 MiB would be most of a small archive.
            connection.execute("PRAGMA wal_autocheckpoint=64")
            if index._version() == 0:
                connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={VERSION}; COMMIT;")
        index._check_version()
        return index

    @classmethod
    def to_read(cls, directory: Path) -> "Index":
        """Beside a writer, or where nobody may write."""
        path = directory / INDEX
        if not path.is_file():
            raise RecordError(
                f"{directory} holds no {INDEX}; an archive that lost it is mended when it is next written"
            )
        with _named(path):
            connection = _reading(path)
        index = cls(connection, path)
        index._check_version()
        return index

    def _version(self) -> int:
        with _named(self._path):
            return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    def _check_version(self) -> None:
        if (found := self._version()) != VERSION:
            raise SchemaMismatch(f"{self._path} has schema {found}, and this version reads {VERSION}")

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what is written inside, or nothing."""
        with _named(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def add(self, digest: str, batch: ArchivedBatch, where: tuple[str, int], archived_at: float) -> None:
        """A batch that is in its place, and on the disk."""
        self._connection.execute(
            f"INSERT INTO batches ({_ROW}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(digest, *where, batch.step, batch.state.value),
                *(msgspec.json.encode(batch.reasons).decode(), batch.trainer_version),
                *(len(batch.rollouts), batch.tokens, archived_at),
            ),
        )

    def seal(self, sealed: Sealed, digests: Sequence[str]) -> None:
        """From now on the batches with these digests are row groups of a segment."""
        places = [(sealed.piece, place, digest) for place, digest in enumerate(digests)]
        self._connection.executemany("UPDATE batches SET piece = ?, place = ? WHERE digest = ?", places)
        self._connection.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?)",
            (sealed.piece, sealed.size, sealed.sha256, time.time(), sealed.last_at),
        )

    def remove(self, entries: Sequence[Entry], why: str) -> None:
        """Batches that are gone from now on, and why."""
        now = time.time()
        for each in entries:
            self._connection.execute("DELETE FROM batches WHERE digest = ?", (each.batch,))
            gone = (
                each.batch,
                each.piece,
                each.step,
                each.state.value,
                each.rollouts,
                each.tokens,
                each.archived_at,
            )
            self._connection.execute(
                "INSERT INTO removed VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*gone, now, why)
            )

    def forget_segment(self, piece: str) -> None:
        """After its batches were removed."""
        self._connection.execute("DELETE FROM segments WHERE piece = ?", (piece,))

    def note(self, what: str) -> None:
        """Something that happened to the archive, for whoever asks later."""
        self._connection.execute("INSERT INTO events VALUES (?, ?)", (time.time(), what))

    def holds(self, digest: str) -> bool:
        """Whether this very batch is there."""
        return bool(self._ask("SELECT 1 FROM batches WHERE digest = ?", digest))

    def entries(self, query: Query = EVERYTHING) -> list[Entry]:
        """Those that are asked for, in the order of steps, and of time within a step."""
        where, values = query.where
        return self._entries(f"{where} ORDER BY step, serial", *values)

    def of_piece(self, piece: str) -> list[Entry]:
        """Those of one journal or segment, in its order."""
        return self._entries("WHERE piece = ? ORDER BY place", piece)

    def named(self, prefix: str) -> list[Entry]:
        """Those whose name begins with it."""
        return self._entries("WHERE substr(digest, 1, ?) = ? ORDER BY serial", len(prefix), prefix)

    def locate(self, digest: str) -> Location | None:
        """One question and not two: between them a journal might become a segment."""
        rows = self._ask(
            "SELECT b.piece, place, sha256 FROM batches b LEFT JOIN segments s ON b.piece = s.piece WHERE digest = ?",
            digest,
        )
        return Location(*rows[0]) if rows else None

    def segments(self) -> list[Sealed]:
        """Every sealed piece, oldest first."""
        rows = self._ask("SELECT piece, bytes, sha256, last_at FROM segments ORDER BY last_at, piece")
        return [Sealed(*row) for row in rows]

    def removed(self, query: Query = EVERYTHING) -> list[Removed]:
        """What is gone, in the order it went."""
        where, values = query.where
        names = Removed.__struct_fields__
        rows = self._ask(f"SELECT * FROM removed {where} ORDER BY rowid", *values)
        return [msgspec.convert(dict(zip(names, row, strict=True)), Removed) for row in rows]

    def events(self) -> list[tuple[float, str]]:
        """What happened to the archive, oldest first."""
        return [(at, what) for at, what in self._ask("SELECT at, what FROM events ORDER BY rowid")]

    def damage(self) -> str | None:
        """What SQLite itself finds wrong with the file."""
        (found,) = self._ask("PRAGMA quick_check(1)")[0]
        return None if found == "ok" else str(found)

    def _entries(self, clause: str, *values: Any) -> list[Entry]:
        rows = self._ask(f"SELECT {_ROW} FROM batches {clause}", *values)
        names = Entry.__struct_fields__
        return [
            msgspec.convert(
                {**dict(zip(names, row, strict=True)), "reasons": msgspec.json.decode(row[5])}, Entry
            )
            for row in rows
        ]

    def _ask(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        with _named(self._path):
            return self._connection.execute(question, values).fetchall()


def _reading(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10, check_same_thread=False
        )
        connection.execute("PRAGMA user_version")
    except sqlite3.OperationalError as error:
        if path.with_name(path.name + "-wal").exists():
            # Its last rows are in there, and to read them SQLite has to write beside it.
            raise RecordError(
                f"{path} was not closed, and cannot be written; copy the archive, and read that"
            ) from error
        # A disk that is only for reading, and an index that was closed: nobody can change it under our eyes.
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?immutable=1", uri=True, check_same_thread=False
        )
    return connection


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """SQLite's errors under names of ours."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) in _NO_ROOM:
            raise ArchiveFull(
                f"{path} cannot grow ({error}); all that was acknowledged is safe, and this batch is not kept: make room"
            ) from error
        raise RecordError(
            f"{path} cannot be used ({error}); move it away, and it is made anew from segments and journals"
        ) from error

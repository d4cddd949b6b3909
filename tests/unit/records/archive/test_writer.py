import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from zerodrift.core.errors import ArchiveFull, ArchiveLocked, InvalidValue, MissingExtra, RecordError
from zerodrift.records.archive import sealing, writer
from zerodrift.records.archive.index import Query
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, BatchState


def steps(directory: Path, **query: Any) -> list[int]:
    reader = ArchiveReader(directory)
    read = [reader.read(entry).step for entry in reader.entries(Query(**query))]
    reader.close()
    return read


def test_what_is_appended_can_be_read_at_once_and_after(directory, made):
    archive = Archive(directory)
    batch = made(tokens=50)
    archive.append(batch)
    reader = ArchiveReader(directory)
    (entry,) = reader.entries()
    assert reader.read(entry) == batch
    assert (entry.step, entry.state, entry.rollouts, entry.tokens) == (7, BatchState.QUARANTINE, 2, 100)
    assert (entry.reasons, entry.trainer_version) == (("k3",), "7")
    assert reader.place(entry) == "journals/suspect-000001.journal"
    archive.close()
    # The same reader, beside which the journal became a segment.
    assert reader.place(entry) == "segments/suspect-000001.parquet"
    assert reader.read(entry) == batch
    assert list(reader.findings()) == []


def test_a_batch_is_flushed_before_it_is_indexed(directory, made, monkeypatch):
    """A kill does not show this, for what was written is still in the system's memory; a loss of power would."""
    archive = Archive(directory)
    archive.append(made(1))
    done: list[str] = []
    for name in ("write", "fsync"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *words, name=name, call=call: (done.append(name), call(*words))[1]
        )
    add = archive._index.add
    monkeypatch.setattr(archive._index, "add", lambda *words: (done.append("index"), add(*words))[1])
    archive.append(made(2))
    assert done == ["write", "fsync", "index"]
    asked = {
        name: archive._index._connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("journal_mode", "synchronous")
    }
    assert asked == {"journal_mode": "wal", "synchronous": 2}
    monkeypatch.undo()
    archive.close()


def test_the_same_batch_again_stays_single(directory, made):
    with Archive(directory) as archive:
        archive.append(made())
        archive.append(made())
    with Archive(directory) as archive:
        archive.append(made())
        archive.append(made(state=BatchState.HALT))
    assert steps(directory) == [7, 7]


def test_healthy_batches_are_sampled_by_their_digest(directory, tmp_path, made):
    settings = ArchiveSettings(healthy_one_in=5)
    for place, order in ((directory, range(200)), (tmp_path / "again", reversed(range(200)))):
        with Archive(place, settings) as archive:
            for step in order:
                archive.append(made(step, BatchState.OK))
                archive.append(made(step, BatchState.WARN)) if step < 10 else None
    healthy = steps(directory, state=BatchState.OK)
    assert 20 < len(healthy) < 65  # 40 of 200, within four standard deviations
    assert steps(tmp_path / "again", state=BatchState.OK) == healthy
    assert steps(directory, state=BatchState.WARN) == list(range(10))


def test_batches_are_asked_for_by_state_and_step(directory, small, made):
    with Archive(directory, small) as archive:
        for step in (3, 1, 2):
            archive.append(made(step, BatchState.OK if step == 2 else BatchState.WARN))
    assert steps(directory) == [1, 2, 3]
    assert steps(directory, first=2) == [2, 3]
    assert steps(directory, last=2, state=BatchState.WARN) == [1]
    assert steps(directory, state=BatchState.HALT) == []


def test_a_second_writer_is_told_who_the_first_is(directory, made):
    program = "import sys, pathlib; from zerodrift.records.archive.writer import Archive; Archive(pathlib.Path(sys.argv[1]))"
    with Archive(directory) as archive:
        with pytest.raises(ArchiveLocked) as caught:
            Archive(directory)
        assert str(os.getpid()) in str(caught.value)
        run = subprocess.run(
            [sys.executable, "-c", program, directory], capture_output=True, text=True, check=False
        )
        assert "ArchiveLocked" in run.stderr
        assert f"process {os.getpid()}" in run.stderr
        archive.append(made())
        assert json.loads((directory / "writer.json").read_bytes())["process"] == os.getpid()
    Archive(directory).close()


def test_many_threads_append_to_one_archive(directory, small, made):
    with Archive(directory, small) as archive:
        threads = [threading.Thread(target=archive.append, args=(made(step),)) for step in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert steps(directory) == list(range(12))


def _append_in_a_fork(archive: Archive, batch: ArchivedBatch, told: Any) -> None:
    try:
        archive.append(batch)
    except RecordError as error:
        told.send(error.code)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_is_another_writer(directory, made):
    with Archive(directory) as archive:
        context = multiprocessing.get_context("fork")
        told, telling = context.Pipe(duplex=False)
        child = context.Process(target=_append_in_a_fork, args=(archive, made(), telling))
        child.start()
        child.join()
        assert told.recv() == "record/invalid"
        archive.append(made())
    assert steps(directory) == [7]


def test_after_the_end_nothing_is_taken(directory, made):
    archive = Archive(directory)
    archive.close()
    archive.close()
    with pytest.raises(RecordError):
        archive.append(made())
    with pytest.raises(InvalidValue), Archive(directory) as again:
        again.append("batch")


@pytest.mark.parametrize("name", ["notes.txt", "archive"])
def test_other_peoples_directories_are_left_alone(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(RecordError):
        Archive(tmp_path if name == "notes.txt" else tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_without_pyarrow_the_extra_is_named_before_anything_is_written(directory, monkeypatch):
    def none(name):
        raise ModuleNotFoundError(name, name="pyarrow")

    monkeypatch.setattr("zerodrift.records.arrow.import_module", none)
    with pytest.raises(MissingExtra) as caught:
        Archive(directory)
    assert "zerodrift[local]" in str(caught.value)
    assert not directory.exists()


@pytest.mark.parametrize("failing", ["fsync", "write"])
def test_a_batch_that_finds_no_room_leaves_nothing(directory, made, monkeypatch, failing):
    archive = Archive(directory)
    archive.append(made(1))
    before = (directory / "journals" / "suspect-000001.journal").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, failing, _full)
        with pytest.raises(ArchiveFull):
            archive.append(made(2))
    assert (directory / "journals" / "suspect-000001.journal").read_bytes() == before
    archive.append(made(2))
    archive.close()
    assert steps(directory) == [1, 2]


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_fails_otherwise_has_another_name(directory, made, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    with Archive(directory) as archive:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", broken)
            with pytest.raises(RecordError) as caught:
                archive.append(made())
        assert caught.value.code == "record/invalid"
        archive.append(made())
    assert steps(directory) == [7]


def test_no_room_for_a_segment_refuses_the_next_batch_and_keeps_the_journal(
    directory, small, made, monkeypatch
):
    archive = Archive(directory, small)
    archive.append(made(1, tokens=100))
    with monkeypatch.context() as patched:
        patched.setattr(sealing, "write_all", _full)
        with pytest.raises(ArchiveFull):
            archive.append(made(2))
    assert list((directory / "segments").iterdir()) == []
    assert steps(directory) == [1]
    archive.append(made(2))
    archive.close()
    assert steps(directory) == [1, 2]


def test_a_segment_that_gives_something_else_back_does_not_replace_the_journal(directory, made, monkeypatch):
    archive = Archive(directory)
    archive.append(made(1))
    with monkeypatch.context() as patched:
        patched.setattr(sealing, "read_batch", lambda *_: made(2))
        with pytest.raises(RecordError) as caught:
            archive.close()
    assert caught.value.code == "record/digest"
    assert steps(directory) == [1]
    Archive(directory).close()
    assert steps(directory) == [1]


def test_an_interrupt_after_the_commit_does_not_cut_what_is_indexed(directory, made, monkeypatch):
    archive = Archive(directory)
    transaction = archive._index.transaction

    class Interrupted:
        def __enter__(self):
            self.inner = transaction()
            self.inner.__enter__()

        def __exit__(self, *what):
            self.inner.__exit__(*what)
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(archive._index, "transaction", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            archive.append(made(1))
    archive.append(made(1))
    archive.close()
    assert steps(directory) == [1]


@pytest.mark.parametrize(
    "settings",
    [
        {"healthy_one_in": 0},
        {"segment_bytes": 10},
        {"segment_bytes": 2048, "max_bytes": 4096},
        {"max_age_s": 0},
        {"max_age_s": float("nan")},
    ],
)
def test_settings_that_keep_nothing_are_refused(settings):
    with pytest.raises(InvalidValue):
        ArchiveSettings(**settings)


def test_a_writer_that_cannot_say_who_it_is_holds_nothing(directory, made, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(writer, "write_atomically", _full)
        with pytest.raises(OSError, match="No space"):
            Archive(directory)
    with Archive(directory) as archive:
        archive.append(made())


def test_a_fork_and_a_holder_without_a_name(directory, made, monkeypatch):
    with Archive(directory) as archive:
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: 1)
            with pytest.raises(RecordError):
                archive.append(made())
        (directory / "writer.json").write_text("{")
        with pytest.raises(ArchiveLocked):
            Archive(directory)


@pytest.mark.parametrize(
    ("code", "error"), [(sqlite3.SQLITE_FULL, "record/full"), (sqlite3.SQLITE_CORRUPT, "record/invalid")]
)
def test_an_index_that_cannot_be_written_keeps_nothing(directory, made, monkeypatch, code, error):
    def failing(*_):
        raised = sqlite3.OperationalError("no")
        raised.sqlite_errorcode = code
        raise raised

    with Archive(directory) as archive:
        archive.append(made(1))
        with monkeypatch.context() as patched:
            patched.setattr(archive._index, "add", failing)
            with pytest.raises(RecordError) as caught:
                archive.append(made(2))
        assert caught.value.code == error
        assert steps(directory) == [1]
        archive.append(made(2))
    assert steps(directory) == [1, 2]


def test_an_archive_without_a_batch_leaves_no_segment(directory, made, monkeypatch):
    with Archive(directory) as archive, monkeypatch.context() as patched:
        patched.setattr(os, "write", _full)
        with pytest.raises(ArchiveFull):
            archive.append(made())
    assert [path for folder in ("journals", "segments") for path in (directory / folder).iterdir()] == []


def test_a_rollback_that_sqlite_made_already_is_not_made_again(directory, made, monkeypatch):
    """As it does by itself where the disk is full."""
    with Archive(directory) as archive:
        index = archive._index

        def failing(*_):
            index._connection.execute("ROLLBACK")
            raise InvalidValue("no")

        with monkeypatch.context() as patched:
            patched.setattr(index, "add", failing)
            with pytest.raises(InvalidValue):
                archive.append(made(1))
        archive.append(made(1))
    assert steps(directory) == [1]

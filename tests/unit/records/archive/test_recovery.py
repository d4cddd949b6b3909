import sqlite3
from pathlib import Path

import pytest

from zerodrift.core.errors import RecordError, SchemaMismatch
from zerodrift.records.archive.journal import encode, frame_of
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.archive.segment import segment_of
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch

JOURNAL = "journals/suspect-000001.journal"


def abandoned(directory: Path, *batches: ArchivedBatch) -> Path:
    """As a kill leaves it: nothing is sealed. Returns the journal."""
    archive = Archive(directory)
    for batch in batches:
        archive.append(batch)
    archive._index.close()
    archive._lock.release()
    return directory / JOURNAL


def steps(directory: Path) -> list[int]:
    reader = ArchiveReader(directory)
    return [reader.read(entry).step for entry in reader.entries()]


def test_a_writer_goes_on_with_the_journal_that_is_there(directory, made):
    abandoned(directory, made(1))
    archive = Archive(directory)
    archive.append(made(2))
    assert archive.recovered == ()
    archive.close()
    assert steps(directory) == [1, 2]
    assert [path.name for path in (directory / "segments").iterdir()] == ["suspect-000001.parquet"]


def test_an_append_that_was_not_finished_is_cut_off_and_said(directory, made):
    journal = abandoned(directory, made(1))
    whole = journal.read_bytes()
    journal.write_bytes(whole + frame_of(encode(made(2)), 1.0)[:-1])
    reader = ArchiveReader(directory)
    assert [entry.step for entry in reader.entries()] == [1]
    assert list(reader.findings()) == []
    assert len(list(reader.unfinished())) == 1
    archive = Archive(directory)
    assert journal.read_bytes() == whole
    assert len(archive.recovered) == 1
    archive.append(made(2))
    archive.close()
    reader = ArchiveReader(directory)
    assert [what for _, what in reader.events()] == list(archive.recovered)
    assert list(reader.unfinished()) == []
    assert steps(directory) == [1, 2]


def test_an_append_that_was_whole_is_finished(directory, made):
    journal = abandoned(directory, made(1))
    journal.write_bytes(journal.read_bytes() + frame_of(encode(made(2)), 1.0))
    with Archive(directory) as archive:
        assert len(archive.recovered) == 1
        archive.append(made(2))
    assert steps(directory) == [1, 2]


def test_a_damaged_journal_loses_one_batch_by_name(directory, made):
    journal = abandoned(directory, made(1), made(2), made(3))
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content)
    reader = ArchiveReader(directory)
    one, two, three = reader.entries()
    assert (reader.read(one).step, reader.read(three).step) == (1, 3)
    with pytest.raises(RecordError) as caught:
        reader.read(two)
    assert caught.value.code == "record/digest"
    assert "suspect-000001.journal" in str(caught.value)
    (finding,) = reader.findings()
    assert (finding.where, finding.code, finding.batches) == (JOURNAL, "record/digest", 1)
    with Archive(directory) as archive:
        assert len(archive.recovered) == 1
        archive.append(made(4))
    assert steps(directory) == [1, 3, 4]
    reader = ArchiveReader(directory)
    assert [(each.step, each.batch) for each in reader.removed()] == [(2, two.batch)]
    assert (directory / "journals" / "suspect-000001.damaged").read_bytes() == content
    assert len(list(reader.unfinished())) == 1


@pytest.mark.parametrize("roll_over", [False, True])
def test_a_journal_that_is_damaged_under_its_writer_loses_one_batch_by_name(directory, made, roll_over):
    archive = Archive(directory, ArchiveSettings(segment_bytes=20_000))
    for step in (1, 2, 3):
        archive.append(made(step, tokens=40))
    journal = directory / JOURNAL
    content = bytearray(journal.read_bytes())
    content[100] ^= 1
    journal.write_bytes(content)
    one, *_ = ArchiveReader(directory).entries()
    for step in (4, 5) if roll_over else ():
        # The second finds the journal full.
        archive.append(made(step, tokens=4000))
    archive.close()
    assert not journal.exists()
    assert (directory / "journals" / "suspect-000001.damaged").read_bytes().startswith(content)
    reader = ArchiveReader(directory)
    assert [(each.step, each.batch) for each in reader.removed()] == [(1, one.batch)]
    assert steps(directory) == ([2, 3, 4, 5] if roll_over else [2, 3])
    assert any("the journal was damaged" in what for _, what in reader.events())
    assert list(reader.findings()) == []
    with pytest.raises(RecordError, match="removed"):
        reader.find(one.batch)


def test_a_batch_that_stands_where_the_index_says_another_is_refused(sealed):
    """Sealed by what left a damaged batch out: places no longer were those of the index."""
    index = sqlite3.connect(sealed / "index.sqlite")
    index.execute("UPDATE batches SET piece = 'suspect-000002' WHERE step = 0")
    index.commit()
    index.close()
    reader = ArchiveReader(sealed)
    first, *_ = reader.entries()
    with pytest.raises(RecordError) as caught:
        reader.read(first)
    assert caught.value.code == "record/digest"


def test_a_journal_that_lost_its_end_after_it_was_acknowledged(directory, made):
    journal = abandoned(directory, made(1), made(2))
    journal.write_bytes(journal.read_bytes()[:-5])
    with Archive(directory):
        pass
    assert steps(directory) == [1]
    assert [each.step for each in ArchiveReader(directory).removed()] == [2]


def test_an_index_that_is_gone_is_made_anew(directory, small, made):
    archive = Archive(directory, small)
    for step in range(3):
        archive.append(made(step, tokens=100))
    entries = ArchiveReader(directory).entries()
    archive._index.close()
    archive._lock.release()
    for path in directory.glob("index.sqlite*"):
        path.unlink()
    with pytest.raises(RecordError):
        ArchiveReader(directory)
    archive = Archive(directory, small)
    assert len(archive.recovered) == 3
    assert ArchiveReader(directory).entries() == entries
    assert steps(directory) == [0, 1, 2]
    archive.close()


def test_a_damaged_segment_is_not_taken_into_a_new_index(sealed, small):
    for path in sealed.glob("index.sqlite*"):
        path.unlink()
    torn = sealed / "segments" / "suspect-000002.parquet"
    torn.write_bytes(torn.read_bytes()[:-7])
    with Archive(sealed, small) as archive:
        assert len(archive.recovered) == 3
    assert steps(sealed) == [0, 2]
    assert torn.is_file()


def test_an_index_of_another_version_or_kind_is_refused(sealed):
    index = sealed / "index.sqlite"
    connection = sqlite3.connect(index)
    connection.execute("PRAGMA user_version=9")
    connection.close()
    for opened in (Archive, ArchiveReader):
        with pytest.raises(SchemaMismatch):
            opened(sealed)
    index.write_bytes(b"not a database at all, and long enough to be looked at" * 100)
    for opened in (Archive, ArchiveReader):
        with pytest.raises(RecordError):
            opened(sealed)


def test_a_kill_between_two_files(sealed, small, made):
    """A segment half-written, one that is not yet indexed, and a journal whose segment counts already."""
    (sealed / "segments" / "suspect-000009.parquet.tmp").write_bytes(b"half")
    (sealed / "journals" / "suspect-000001.journal").write_bytes(frame_of(encode(made(0, tokens=100)), 1.0))
    with Archive(sealed, small) as archive:
        assert archive.recovered == ()
    assert steps(sealed) == [0, 1, 2]
    names = {path.name for folder in ("journals", "segments") for path in (sealed / folder).iterdir()}
    assert names == {f"suspect-00000{number}.parquet" for number in (1, 2, 3)}


def test_a_journal_of_which_nothing_is_left(directory, made):
    journal = abandoned(directory, made(1))
    journal.write_bytes(b"\0" * 200)
    with Archive(directory) as archive:
        assert len(archive.recovered) == 1
    assert steps(directory) == []
    assert list((directory / "segments").iterdir()) == []


def test_a_segment_that_is_not_what_it_says_is_not_taken_in(directory, made):
    """With an index that was lost only the batches themselves say what they should be."""
    with Archive(directory):
        pass
    names = [encode(made(1)).digest, encode(made(2)).digest]
    for number, (name, step) in enumerate([(names[0], 1), (names[0], 2), (names[0], 1)], 1):
        path = directory / "segments" / f"suspect-00000{number}.parquet"
        path.write_bytes(segment_of([(name, 1.0, made(step))]))
    with Archive(directory) as archive:
        assert len(archive.recovered) == 3
    # The third holds the batch of the first once more: it is there, and is counted once.
    assert steps(directory) == [1]


def test_an_index_that_cannot_be_opened_for_writing_beside_it(sealed, monkeypatch):
    connect = sqlite3.connect

    def refused(name, **options):
        if "mode=ro" in name:
            raise sqlite3.OperationalError("unable to open database file")
        return connect(name, **options)

    monkeypatch.setattr(sqlite3, "connect", refused)
    assert [entry.step for entry in ArchiveReader(sealed).entries()] == [0, 1, 2]
    (sealed / "index.sqlite-wal").write_bytes(b"")
    with pytest.raises(RecordError):
        ArchiveReader(sealed)

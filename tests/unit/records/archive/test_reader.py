import shutil
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from zerodrift.core.errors import MissingExtra, RecordError
from zerodrift.records.archive.index import Location
from zerodrift.records.archive.journal import encode, frame_of
from zerodrift.records.archive.layout import is_archive
from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.archive.segment import open_segment
from zerodrift.records.archive.writer import Archive


def altered(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [altered, lambda content: content[:-40], lambda content: content[:9]])
def test_a_segment_that_is_not_the_one_that_was_sealed_is_refused_by_name(sealed, damage):
    path = sealed / "segments" / "suspect-000002.parquet"
    path.write_bytes(damage(path.read_bytes()))
    reader = ArchiveReader(sealed)
    first, second, third = reader.entries()
    assert (reader.read(first).step, reader.read(third).step) == (0, 2)
    with pytest.raises(RecordError) as caught:
        reader.read(second)
    assert caught.value.code == "record/digest"
    assert "segments/suspect-000002.parquet" in str(caught.value)
    assert [(each.where, each.batches) for each in reader.findings()] == [
        ("segments/suspect-000002.parquet", 1)
    ]


def test_a_segment_that_is_missing(sealed):
    (sealed / "segments" / "suspect-000001.parquet").unlink()
    reader = ArchiveReader(sealed)
    first, second, _ = reader.entries()
    with pytest.raises(RecordError) as caught:
        reader.read(first)
    assert "segments/suspect-000001.parquet" in str(caught.value)
    assert reader.read(second).step == 1


def test_a_sound_archive_has_no_findings(sealed):
    reader = ArchiveReader(sealed)
    assert list(reader.findings()) == list(reader.unfinished()) == []


def test_a_batch_by_the_beginning_of_its_name(sealed):
    reader = ArchiveReader(sealed)
    for entry in reader.entries():
        assert reader.find(entry.batch[:12]) == entry
    for name in ("", "zz"):
        with pytest.raises(RecordError):
            reader.find(name)


def test_a_name_that_two_batches_begin_with(sealed, monkeypatch):
    reader = ArchiveReader(sealed)
    monkeypatch.setattr(reader._index, "named", lambda _: reader.entries())
    with pytest.raises(RecordError) as caught:
        reader.find("a")
    assert all(entry.batch[:16] in str(caught.value) for entry in reader.entries())


def test_what_is_no_archive(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        assert not is_archive(path)
        with pytest.raises(RecordError):
            ArchiveReader(path)


def on_a_disk_for_reading(directory: Path) -> str:
    """What a reader says of it, in a mount that nobody else sees."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this system lets nobody mount a disk for reading alone")
    program = (
        "import sys, pathlib\nfrom zerodrift.records.archive.reader import ArchiveReader\n"
        "reader = ArchiveReader(pathlib.Path(sys.argv[1]))\nprint(*(reader.read(e).step for e in reader.entries()))"
    )
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    words = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        mount,
        str(directory),
        sys.executable,
        "-c",
        program,
        str(directory),
    ]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    return run.stdout.strip() or run.stderr.splitlines()[-1]


def test_a_disk_that_cannot_be_written_is_read(sealed, made):
    assert on_a_disk_for_reading(sealed) == "0 1 2"
    archive = Archive(sealed)
    archive.append(made(3))
    assert on_a_disk_for_reading(sealed) == "0 1 2 3"
    (sealed / "index.sqlite-shm").rename(sealed / "away")
    assert "RecordError" in on_a_disk_for_reading(sealed)
    (sealed / "away").rename(sealed / "index.sqlite-shm")
    archive.close()


def test_readers_beside_a_writer_that_seals(directory, small, made):
    """Journals become segments between the question where a batch is and the reading of it."""
    wanted = {step: made(step, tokens=60) for step in range(40)}
    archive = Archive(directory, small)
    archive.append(wanted[0])
    wrong: list[object] = []
    done, passes = threading.Event(), []

    def read():
        reader = ArchiveReader(directory)
        try:
            while not done.is_set():
                wrong.extend(each.step for each in reader.entries() if reader.read(each) != wanted[each.step])
                passes.append(1)
        except RecordError as error:
            wrong.append(error)
        finally:
            reader.close()

    readers = [threading.Thread(target=read) for _ in range(3)]
    for each in readers:
        each.start()
    for step in range(1, 40):
        archive.append(wanted[step])
    done.set()
    for each in readers:
        each.join()
    archive.close()
    assert wrong == []
    assert passes
    assert len(ArchiveReader(directory).entries()) == 40


def test_without_pyarrow_nothing_is_called_damaged(sealed, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name, name="pyarrow")

    monkeypatch.setattr("zerodrift.records.arrow.import_module", missing)
    reader = ArchiveReader(sealed)
    assert len(reader.entries()) == 3
    with pytest.raises(MissingExtra):
        list(reader.findings())


def test_findings_of_every_kind(sealed, made, monkeypatch):
    reader = ArchiveReader(sealed)
    with monkeypatch.context() as patched:
        patched.setattr(reader._index, "damage", lambda: "a page is gone")
        patched.setattr(reader, "read", lambda _: made(50))
        found = list(reader.findings())
    assert [each.where for each in found] == [
        "index.sqlite",
        *(f"segments/suspect-00000{n}.parquet" for n in (1, 2, 3)),
    ]
    assert {each.code for each in found[1:]} == {"record/digest"}
    (sealed / "segments" / "suspect-000009.parquet").write_bytes(b"x")
    journal = sealed / "journals" / "suspect-000010.journal"
    journal.symlink_to(sealed / "sealed-since")
    assert [line.split(":")[0] for line in reader.unfinished()] == ["segments/suspect-000009.parquet"]


def test_a_batch_that_was_removed_since(sealed, small):
    reader = ArchiveReader(sealed)
    first = reader.entries()[0]
    later = msgspec.structs.replace(first, batch="0" * 64)
    with pytest.raises(RecordError):
        reader.read(later)
    assert reader.place(later) == "removed"


def test_a_journal_whose_frames_are_others_than_the_index_says(directory, made):
    archive = Archive(directory)
    archive.append(made(1))
    (directory / "journals" / "suspect-000001.journal").write_bytes(frame_of(encode(made(2)), 1.0))
    reader = ArchiveReader(directory)
    with pytest.raises(RecordError) as caught:
        reader.read(reader.entries()[0])
    assert caught.value.code == "record/digest"
    archive.close()


def test_a_segment_that_is_gone_between_two_looks_is_asked_for_again(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_segment(tmp_path / "gone.parquet")


def test_a_journal_that_was_sealed_between_question_and_answer(sealed, monkeypatch):
    reader = ArchiveReader(sealed)
    entry = reader.entries()[1]
    answers = [Location(entry.piece, 0, None), reader._index.locate(entry.batch)]
    monkeypatch.setattr(reader, "_located", lambda _: answers.pop(0))
    assert reader.read(entry).step == 1


def test_a_directory_that_is_no_archive_says_where_one_is(sealed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(sealed, run / "archive")
    for directory, told in ((run, str(run / "archive")), (tmp_path / "nothing", "not there")):
        with pytest.raises(RecordError) as caught:
            ArchiveReader(directory)
        assert told in str(caught.value)

import time

import msgspec
import pytest

from zerodrift.core.errors import RecordError
from zerodrift.records.archive.index import Sealed
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.archive.retention import doomed
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import BatchState

NOW = 1000.0
SEGMENTS = [
    Sealed("suspect-000001", 1000, "a", 10.0),
    Sealed("healthy-000002", 1000, "b", 20.0),
    Sealed("suspect-000003", 1000, "c", 30.0),
    Sealed("healthy-000004", 1000, "d", 940.0),
]


def going(**settings: float) -> list[str]:
    found = doomed(SEGMENTS, msgspec.convert({"segment_bytes": 1024, **settings}, ArchiveSettings), NOW)
    return [each.segment.piece for each in found]


def test_without_a_limit_nothing_goes():
    assert going() == []


@pytest.mark.parametrize(
    ("most", "gone"),
    [
        (4000, []),
        (3999, ["healthy-000002"]),
        (2500, ["healthy-000002", "healthy-000004"]),
        (2048, ["healthy-000002", "healthy-000004"]),
    ],
)
def test_by_size_healthy_ones_go_first_and_the_oldest_of_them(most, gone):
    assert going(max_bytes=most + 2 * 1024) == gone


def test_suspect_ones_go_by_size_when_no_healthy_one_is_left():
    many = [Sealed(f"suspect-{number:06d}", 1000, "x", float(number)) for number in range(10, 15)]
    found = doomed([*many, SEGMENTS[3]], ArchiveSettings(segment_bytes=1024, max_bytes=5120), NOW)
    assert [each.segment.piece for each in found] == ["healthy-000004", "suspect-000010", "suspect-000011"]


def test_by_age_of_the_youngest_batch_in_a_segment():
    assert going(max_age_s=100.0) == ["healthy-000002", "suspect-000001", "suspect-000003"]
    assert going(max_age_s=50.0) == ["healthy-000002", "healthy-000004", "suspect-000001", "suspect-000003"]
    assert going(max_age_s=985.0) == ["suspect-000001"]


def test_an_archive_stays_below_its_size_and_says_what_it_removed(directory, made):
    settings = ArchiveSettings(healthy_one_in=1, segment_bytes=4096, max_bytes=40 * 1024)
    with Archive(directory, settings) as archive:
        for step in range(60):
            archive.append(made(step, BatchState.OK if step % 2 else BatchState.QUARANTINE, tokens=200))
            files = [path for folder in ("journals", "segments") for path in (directory / folder).iterdir()]
            # A journal is looked at before a batch goes into it, so each may hold one batch more.
            assert sum(path.stat().st_size for path in files) < 40 * 1024 + 2 * 8192
    reader = ArchiveReader(directory)
    kept, removed = reader.entries(), reader.removed()
    assert {entry.step for entry in kept} | {each.step for each in removed} == set(range(60))
    assert len(kept) + len(removed) == 60
    # A suspect batch went only after every healthy one that was older than it.
    for each in removed:
        if each.state == "quarantine":
            assert not [entry for entry in kept if entry.state is BatchState.OK and entry.step < each.step]
    assert list(reader.findings()) == []
    with pytest.raises(RecordError) as caught:
        reader.find(removed[0].batch)
    assert removed[0].why in str(caught.value)


def test_what_is_too_old_goes_when_the_archive_is_opened(sealed, small, made, monkeypatch):
    later = time.time() + 50
    monkeypatch.setattr(time, "time", lambda: later)
    with Archive(sealed, msgspec.structs.replace(small, max_age_s=40.0)) as archive:
        archive.append(made(9))
    assert [entry.step for entry in ArchiveReader(sealed).entries()] == [9]
    assert [path.name for path in (sealed / "segments").iterdir()] == ["suspect-000004.parquet"]
    assert {each.why for each in ArchiveReader(sealed).removed()} == {"older than 40 s"}


def test_a_removed_segment_that_is_still_there_is_not_taken_back(sealed, small, monkeypatch):
    first = sealed / "segments" / "suspect-000001.parquet"
    content = first.read_bytes()
    later = time.time() + 50
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: later)
        Archive(sealed, msgspec.structs.replace(small, max_age_s=40.0)).close()
    # Killed after the index forgot it and before the file went.
    first.write_bytes(content)
    with Archive(sealed, small) as archive:
        assert archive.recovered == ()
    assert not first.exists()
    assert ArchiveReader(sealed).entries() == []

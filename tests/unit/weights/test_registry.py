"""The log of versions: whole lines, in order, sealed."""

import errno
import os

import msgspec
import pytest

from zerodrift.core.errors import (
    ArchiveFull,
    ArchiveLocked,
    DigestMismatch,
    NotRetained,
    RecordError,
    VersionConflict,
)
from zerodrift.core.version import WeightVersion
from zerodrift.weights.registry import LOCK, LOG, Kind, Registry

A, B, C = (WeightVersion(name, name * 64) for name in "abc")


@pytest.fixture
def log(tmp_path):
    """Two versions, of which the second is current."""
    registry = Registry(tmp_path)
    registry.append(Kind.COMMITTED, A, "ma")
    registry.append(Kind.PUBLISHED, A, "ma")
    registry.append(Kind.COMMITTED, B, "mb")
    registry.append(Kind.PUBLISHED, B, "mb", follows="a", kv="keep")
    registry.close()
    return tmp_path / LOG


def opened(log):
    return Registry(log.parent)


def test_what_was_said_is_there_again(log):
    registry = opened(log)
    versions = registry.versions
    assert (versions.current, versions.previous, versions.kept) == ("b", "a", ["a", "b"])
    assert [entry.serial for entry in registry.entries] == [1, 2, 3, 4]
    assert registry.entries[-1].kv == "keep"
    registry.append(Kind.PUBLISHED, A, "ma", follows="b")
    assert (registry.versions.current, registry.versions.previous) == ("a", "b")
    registry.close()
    again = opened(log)
    assert again.versions == registry.versions
    again.close()


@pytest.mark.parametrize(
    ("kind", "version", "follows", "error"),
    [
        (Kind.COMMITTED, A, None, VersionConflict),
        (Kind.PUBLISHED, C, "b", NotRetained),
        (Kind.PUBLISHED, WeightVersion("a", "other"), "b", NotRetained),
        (Kind.PUBLISHED, A, "a", VersionConflict),
        (Kind.PUBLISHED, A, None, VersionConflict),
        (Kind.FORGOTTEN, B, None, VersionConflict),
        (Kind.ABORTED, A, None, VersionConflict),
        (Kind.FORGOTTEN, C, None, NotRetained),
    ],
)
def test_what_contradicts_the_log_is_refused_and_not_written(log, kind, version, follows, error):
    registry, before = opened(log), log.read_bytes()
    with pytest.raises(error):
        registry.append(kind, version, "m", follows=follows)
    registry.close()
    assert log.read_bytes() == before


def test_what_was_forgotten_or_aborted_cannot_be_published(log):
    registry = opened(log)
    registry.append(Kind.COMMITTED, C, "mc")
    registry.append(Kind.ABORTED, C, "mc")
    registry.append(Kind.FORGOTTEN, A, "ma")
    assert (registry.versions.kept, registry.versions.previous) == (["b"], None)
    for version in (A, C):
        with pytest.raises(NotRetained):
            registry.append(Kind.PUBLISHED, version, "m", follows="b")
    with pytest.raises(VersionConflict):
        registry.append(Kind.COMMITTED, A, "m")
    registry.append(Kind.COMMITTED, C, "again")  # it never served, so nothing bears its label
    assert registry.versions.kept == ["b", "c"]
    registry.close()


def test_a_line_cut_anywhere_was_never_said(log):
    whole = log.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        log.write_bytes(whole[:end])
        registry = opened(log)
        assert (registry.versions.current, len(registry.entries)) == ("a", 3)
        registry.close()
        assert log.read_bytes() == whole[:start]


def lines(content):
    return content.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda c: c.replace(b'"kv":"keep"', b'"kv":"drain"'), DigestMismatch),
        (lambda c: c.replace(b'"ma"', b'"mx"', 1), DigestMismatch),
        (lambda c: b"".join(lines(c)[1:]), DigestMismatch),
        (lambda c: b"".join([*lines(c)[:1], *lines(c)[2:]]), DigestMismatch),
        (lambda c: b"".join([*lines(c)[:2], lines(c)[1], *lines(c)[2:]]), DigestMismatch),
        (lambda c: b"".join(lines(c)[index] for index in (0, 2, 1, 3)), DigestMismatch),
        (lambda c: c.replace(b'"serial":2', b'"serial":"2"'), RecordError),
        (lambda c: c.replace(b"\n", b"\n\n", 1), RecordError),
        (lambda c: b"\x00" * 20 + b"\n" + c, RecordError),
    ],
)
def test_a_log_that_was_edited_is_refused(log, damage, error):
    damaged = damage(log.read_bytes())
    log.write_bytes(damaged)
    for _ in range(2):  # the lock is let go of
        with pytest.raises(error):
            opened(log)
    assert log.read_bytes() == damaged


def test_a_second_process_is_refused(log):
    registry = opened(log)
    with pytest.raises(ArchiveLocked):
        opened(log)
    registry.close()
    registry.close()
    opened(log).close()


def test_a_full_disk_leaves_no_half_line(log, monkeypatch):
    registry, before = opened(log), log.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", _short_then_full(os.write))
        with pytest.raises(ArchiveFull):
            registry.append(Kind.COMMITTED, C, "mc")
    assert log.read_bytes() == before
    assert registry.versions.kept == ["a", "b"]
    registry.append(Kind.COMMITTED, C, "mc")
    registry.close()
    assert len(lines(log.read_bytes())) == 5
    again = opened(log)
    assert again.versions.kept == ["a", "b", "c"]
    again.close()


def _short_then_full(real):
    wrote = []

    def write(handle, content):
        if wrote:
            raise OSError(errno.ENOSPC, "No space left on device")
        wrote.append(1)
        return real(handle, bytes(content)[:40])

    return write


def test_a_seal_covers_every_field(log):
    (first, *_) = lines(log.read_bytes())
    entry = msgspec.json.decode(first)
    assert set(entry) == {"serial", "kind", "version", "manifest", "follows", "kv", "at", "seal"}
    for name, value in entry.items():
        other = {**entry, name: "x" * 64 if isinstance(value, str) or value is None else 9}
        if name in ("kind", "version"):
            other = {**entry, name: "forgotten" if name == "kind" else {"label": "z", "digest": None}}
        log.write_bytes(msgspec.json.encode(other) + b"\n")
        with pytest.raises(DigestMismatch):
            opened(log)


def test_a_lock_that_was_tidied_away_lets_nobody_in(log):
    first = opened(log)
    (log.parent / LOCK).unlink()
    with pytest.raises(ArchiveLocked):
        opened(log)
    first.close()
    opened(log).close()


def test_nobody_goes_back_to_what_never_served(log):
    registry = opened(log)
    registry.append(Kind.COMMITTED, C, "mc")
    versions = registry.versions
    registry.close()
    assert versions.to_go_back_to(None).version == A
    with pytest.raises(NotRetained, match="never served"):
        versions.to_go_back_to("c")
    with pytest.raises(NotRetained, match="not kept"):
        versions.to_go_back_to("d")

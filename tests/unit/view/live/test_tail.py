"""Lines of a file that grows, is torn, cut, moved away, or not there: each is read once and whole."""

import os
from pathlib import Path

from zerodrift.view.live import tail as tails
from zerodrift.view.live.tail import Tail


def drained(tail: Tail) -> list[bytes]:
    found: list[bytes] = []
    while lines := tail.read():
        found += lines
    return found


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_each_line_once_and_never_half(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    assert not tail.found
    append(path, b"one\ntw")
    assert drained(tail) == [b"one"]
    assert tail.found
    assert drained(tail) == []
    append(path, b"o\n\nthree\n")
    assert drained(tail) == [b"two", b"three"]
    tail.close()


def test_a_file_that_is_moved_away_is_read_to_its_end_and_then_the_next(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    append(path, b"1\n")
    tail = Tail(path)
    assert drained(tail) == [b"1"]
    append(path, b"2\n")
    path.rename(tmp_path / "steps.jsonl.1")
    assert drained(tail) == [b"2"]
    append(tmp_path / "steps.jsonl.1", b"3\n4")
    assert drained(tail) == [b"3"]
    append(path, b"5\n")
    assert drained(tail) == [b"5"]
    assert tail.skipped == 1, "the 4 had no end"
    tail.close()


def test_a_file_that_is_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    append(path, b"first\nsecond\n")
    tail = Tail(path)
    assert drained(tail) == [b"first", b"second"]
    os.truncate(path, 0)
    append(path, b"anew\n")
    assert drained(tail) == [b"anew"]
    tail.close()


def test_a_line_without_an_end_fills_no_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tails, "CHUNK", 8)
    monkeypatch.setattr(tails, "LONGEST", 16)
    path = tmp_path / "steps.jsonl"
    append(path, b"x" * 100 + b"\nshort\n")
    tail = Tail(path)
    found = []
    for _ in range(40):
        found += tail.read()
        assert len(tail._held) <= 24
    assert found == [b"short"]
    assert tail.skipped == 1
    tail.close()


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "steps.jsonl")
    (tmp_path / "folder").mkdir()
    for name in ("steps.jsonl", "folder"):
        tail = Tail(tmp_path / name)
        assert tail.read() == []
        assert not tail.found

import math
import os

import pytest

from zerodrift.core.errors import NonFinite, RecordError
from zerodrift.core.request import Prompt
from zerodrift.records import codec
from zerodrift.records.codec import LineWriter, drop_torn_line, read_lines, write_atomically

PROMPTS = [Prompt((1, 2)), Prompt((3,), "é\n"), Prompt((4, 5, 6), None, "salt")]


@pytest.fixture
def path(tmp_path):
    """A sound file of three lines."""
    path = tmp_path / "prompts.jsonl"
    with LineWriter[Prompt](path) as writer:
        writer.write(*PROMPTS)
    return path


def test_what_is_written_is_read_and_a_writer_appends(path):
    assert list(read_lines(path, Prompt)) == PROMPTS
    with LineWriter[Prompt](path) as writer:
        writer.write()
        writer.write(PROMPTS[0])
    assert list(read_lines(path, Prompt)) == [*PROMPTS, PROMPTS[0]]


def test_lines_are_synced_before_write_returns(path, monkeypatch):
    """Flushed first: what Python still holds would not be synced."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    with LineWriter[Prompt](path) as writer:
        for prompt in PROMPTS:
            writer.write(prompt)
            assert synced[-1] == path.stat().st_size
    assert len(synced) == len(PROMPTS)


def test_reading_can_begin_after_a_header(path):
    assert list(read_lines(path, Prompt, skip=1)) == PROMPTS[1:]
    path.write_bytes(b"header\n" + path.read_bytes() + b"oops\n")
    with pytest.raises(RecordError, match=r"prompts.jsonl, line 5: "):
        list(read_lines(path, Prompt, skip=1))


@pytest.mark.parametrize(
    "line",
    [
        *(
            b"{}",
            b"",
            b"[1]",
            b'{"token_ids": [-1]}',
            b'{"token_ids": []}',
            b'{"token_ids": [1], "extra": 1}',
        ),
        b'{"token_ids": [1]} {}',
        b'{"token_ids": [1], "text": "\xff"}',
        b"\x00\x01\x02",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"token_ids": ' + b"[" * 100_000,
    ],
    ids=lambda line: str(line[:30]),
)
@pytest.mark.parametrize("number", [1, 3])
def test_a_bad_line_is_refused_by_number(path, line, number):
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = line + b"\n"
    path.write_bytes(b"".join(lines))
    prompts = read_lines(path, Prompt)
    assert [next(prompts) for _ in range(number - 1)] == PROMPTS[: number - 1]
    with pytest.raises(RecordError, match=rf"^prompts\.jsonl, line {number}: "):
        next(prompts)


def test_a_torn_line_is_called_torn_and_can_be_dropped(path):
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        kept = whole[:cut].rfind(b"\n") + 1
        if kept != cut:
            number = whole[:cut].count(b"\n") + 1
            with pytest.raises(RecordError, match=f"line {number}: the line is torn"):
                list(read_lines(path, Prompt))
        assert drop_torn_line(path) is (kept != cut)
        assert path.read_bytes() == whole[:kept]
        assert drop_torn_line(path) is False


def test_memory_is_bounded_by_the_longest_line_allowed(tmp_path):
    """A hole of 8 GiB without a newline is one line, and would not fit into memory."""
    path = tmp_path / "hole.jsonl"
    with path.open("wb") as file:
        file.truncate(8 * 2**30)
    with pytest.raises(RecordError, match="line 1"):
        next(read_lines(path, Prompt))


def test_a_torn_line_is_dropped_from_a_file_larger_than_memory(tmp_path):
    path = tmp_path / "hole.jsonl"
    with path.open("wb") as file:
        file.truncate(2**40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"x" * (2 * codec.BLOCK_BYTES + 5))
    assert drop_torn_line(path) is True
    assert path.stat().st_size == 2**40 + 1


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_newline_is_found_wherever_blocks_meet(tmp_path, monkeypatch, extra):
    monkeypatch.setattr(codec, "BLOCK_BYTES", 8)
    path = tmp_path / "blocks.jsonl"
    path.write_bytes(b"ab\n" + b"x" * (16 + extra))
    assert drop_torn_line(path) is True
    assert path.read_bytes() == b"ab\n"
    path.write_bytes(b"x" * (16 + extra))
    assert drop_torn_line(path) is True
    assert path.read_bytes() == b""


def test_a_line_of_exactly_the_limit_is_read(path, monkeypatch):
    longest = max(len(line) for line in path.read_bytes().splitlines(keepends=True))
    monkeypatch.setattr(codec, "MAX_LINE_BYTES", longest)
    assert list(read_lines(path, Prompt)) == PROMPTS
    monkeypatch.setattr(codec, "MAX_LINE_BYTES", longest - 1)
    with pytest.raises(RecordError):
        list(read_lines(path, Prompt))


def test_a_line_that_could_not_be_read_is_not_written(path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(codec, "MAX_LINE_BYTES", 60)
    with LineWriter[object](path) as writer:
        with pytest.raises(RecordError):
            writer.write(PROMPTS[0], Prompt(tuple(range(100))))
        with pytest.raises(TypeError):
            writer.write(PROMPTS[0], object())
    assert path.read_bytes() == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_have_is_not_written_as_null(path, value):
    before = path.read_bytes()
    with LineWriter[object](path) as writer:
        with pytest.raises(NonFinite, match=rf"a.b\[1\]={value}"):
            writer.write(PROMPTS[0], {"a": {"b": (None, value)}})
        assert path.read_bytes() == before
        writer.write({"a": None, "b": [1.5, "null"]})


def test_a_failed_atomic_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, b"none")
    write_atomically(path, b"one")
    assert path.read_bytes() == b"one"

    def fail(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"no space"):
        write_atomically(path, b"two")
    assert path.read_bytes() == b"one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]

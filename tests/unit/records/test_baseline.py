import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerodrift.core.errors import InvalidValue, RecordError, SchemaMismatch
from zerodrift.records import codec
from zerodrift.records.baseline import BaselineHeader, BaselineRow, read_finished, read_header, read_rows
from zerodrift.records.codec import LineWriter

ROW: dict[str, Any] = {
    "index": 0,
    "prompt": (1, 2),
    "output": (3, 4),
    "logprobs": (-0.5, -1.0),
    "raw_logprobs": (-0.25, -2.0),
}
PLAIN = [BaselineRow(**ROW), BaselineRow(**{**ROW, "index": 1, "prompt": (9,)})]


@pytest.fixture
def rows(header):
    return [row.sealed(header.weights) for row in PLAIN]


@pytest.fixture
def path(tmp_path, header, rows):
    return write(tmp_path / "base.jsonl", header, rows)


def write(path: Path, header: BaselineHeader, rows: list[BaselineRow]) -> Path:
    with LineWriter[BaselineHeader | BaselineRow](path) as writer:
        writer.write(header, *rows)
    return path


def test_a_baseline_is_read_back_in_the_order_of_the_prompts(path, tmp_path, header, rows):
    assert read_header(path) == header
    assert list(read_rows(path)) == rows
    turned = write(tmp_path / "turned.jsonl", header, rows[::-1])
    assert read_finished(path) == read_finished(turned) == (header, tuple(rows))


CHANGES: list[dict[str, Any]] = [
    {"logprobs": (-0.5, -1.25)},
    {"raw_logprobs": (-0.25, -2.5)},
    {"output": (3, 5)},
    {"prompt": (1, 3)},
    {"index": 7},
    {"index": 0},
    {"seal": ""},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_row_that_was_changed_or_is_there_twice_is_refused(tmp_path, header, rows, change):
    second = rows[0] if change == {"index": 0} else msgspec.structs.replace(rows[1], **change)
    path = write(tmp_path / "base.jsonl", header, [rows[0], second])
    with pytest.raises(RecordError, match="line 3"):
        list(read_rows(path))


def test_other_weights_missing_rows_and_no_file_are_refused(tmp_path, header, rows):
    others = write(tmp_path / "others.jsonl", msgspec.structs.replace(header, weights="others"), rows)
    with pytest.raises(RecordError, match="line 2"):
        list(read_rows(others))
    with pytest.raises(RecordError):
        read_finished(write(tmp_path / "base.jsonl", header, rows[1:]))
    with pytest.raises(RecordError):
        read_header(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{}\n", b"[]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"prompt": "hi"}\n']
)
def test_what_is_no_header(path, line, monkeypatch):
    monkeypatch.setattr(codec, "MAX_LINE_BYTES", 100_000)
    path.write_bytes(line)
    with pytest.raises(RecordError, match=r"base.jsonl.*line 1") as caught:
        read_header(path)
    assert caught.value.code == "record/invalid"


@pytest.mark.parametrize("extra", [{}, {"tokenizer": "unknown to this version"}])
def test_a_header_of_another_schema(path, header, extra):
    """Also where the other schema has other fields, as it will."""
    other = {**msgspec.to_builtins(header), "schema": "zerodrift.baseline/2", **extra}
    path.write_bytes(msgspec.json.encode(other) + b"\n")
    with pytest.raises(SchemaMismatch):
        read_header(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": (-0.5,)},
        {"raw_logprobs": ()},
        {"output": (3,)},
        {"logprobs": (-0.5, math.nan)},
        {"raw_logprobs": (-9999.0, -1.0)},
        {"logprobs": (-0.5, 1.0)},
        {"index": -1},
        {"prompt": ()},
        {"prompt": (-4,)},
        {"output": (3, -4)},
    ],
    ids=str,
)
def test_an_impossible_row(changes):
    with pytest.raises((InvalidValue, RecordError)):
        BaselineRow(**{**ROW, **changes})


@pytest.mark.parametrize(
    "line",
    [
        b"oops\n",
        b"{}\n",
        b'{"index":1,"prompt":[1],"output":[3],"logprobs":[],"raw_logprobs":[-1.0]}\n',
        b'{"index":1,"prompt":[1],"output":[3],"logprobs":[-9999],"raw_logprobs":[-1.0]}\n',
        b'{"index":1,',
        b"\xff\n",
    ],
)
def test_a_bad_row_is_refused_by_number(path, rows, line):
    with path.open("ab") as file:
        file.write(line)
    read = read_rows(path)
    assert [next(read), next(read)] == rows
    with pytest.raises(RecordError, match=r"^base\.jsonl, line 4: "):
        next(read)

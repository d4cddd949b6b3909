import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerodrift.core.errors import RecordError, SchemaMismatch
from zerodrift.records.directory import VERDICT, check_new, new_directory, read_verdict, write_verdict
from zerodrift.records.verdict import CauseFound, VerdictRecord


def test_a_verdict_is_written_for_people_and_read_back(tmp_path: Path, record: VerdictRecord) -> None:
    path = write_verdict(tmp_path, record)
    assert path == tmp_path / VERDICT
    text = path.read_text(encoding="utf-8")
    assert text.startswith('{\n  "schema": "zerodrift.verdict/1",\n  "verdict": "PASS"')
    assert text.endswith("}\n")
    assert read_verdict(tmp_path) == record


def test_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        read_verdict(tmp_path)
    with pytest.raises(RecordError):
        read_verdict(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        b'{"schema": 1}',
        b'{"schema": "zerodrift.verdict/1"}',
        b'{"schema": "zerodrift.verdict/1", "x": ' + b"[" * 100_000,
        b'{"schema": "\xff"}',
    ],
)
def test_a_damaged_verdict(tmp_path: Path, content: bytes) -> None:
    (tmp_path / VERDICT).write_bytes(content)
    with pytest.raises(RecordError) as caught:
        read_verdict(tmp_path)
    assert caught.value.code == "record/invalid"


def test_another_schema_with_other_fields(tmp_path: Path) -> None:
    (tmp_path / VERDICT).write_text(json.dumps({"schema": "zerodrift.verdict/9", "colour": "red"}))
    with pytest.raises(SchemaMismatch):
        read_verdict(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["floor", "metrics", "gates"])
def test_a_number_that_json_cannot_carry_is_refused_before_it_is_written(
    tmp_path: Path, verdict: dict[str, Any], part: str, value: float
) -> None:
    record = VerdictRecord(**{**verdict, part: {"k3": value}})
    with pytest.raises(
        RecordError, match=rf"verdict.json would have a number that JSON cannot carry.*\$\.{part}"
    ):
        write_verdict(tmp_path, record)
    assert not list(tmp_path.iterdir())


def test_also_inside_a_cause(tmp_path: Path, record: VerdictRecord) -> None:
    cause = CauseFound(
        cause="unexplained",
        gating=True,
        explained=0.5,
        interval=(math.nan, 1.0),
        evidence="",
        fix="",
        found_by="parity",
    )
    with pytest.raises(RecordError, match=r"\$\.causes\[0\]\.interval\[0\]"):
        write_verdict(tmp_path, msgspec.structs.replace(record, causes=(cause,)))


def test_a_second_verdict_replaces_the_first(tmp_path: Path, record: VerdictRecord) -> None:
    write_verdict(tmp_path, record)
    other = msgspec.structs.replace(record, says="Twice.")
    write_verdict(tmp_path, other)
    assert read_verdict(tmp_path) == other
    assert [entry.name for entry in tmp_path.iterdir()] == [VERDICT]


def test_a_new_directory_is_held_while_it_is_written(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "new"
    check_new(directory)
    assert not directory.exists()
    with (
        new_directory(directory),
        pytest.raises(RecordError),
        new_directory(directory),
    ):
        pass
    # A run that was killed leaves its lock file, which is nothing to lose.
    with new_directory(directory):
        (directory / VERDICT).touch()
    with pytest.raises(RecordError, match=r"verdict.json.*--out"):
        check_new(directory)
    with pytest.raises(RecordError), new_directory(directory):
        pass


def test_a_file_is_no_new_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="--out"):
        check_new(tmp_path / "file")

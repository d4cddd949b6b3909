import json
import math
from typing import Any

import msgspec
import pytest

from zerodrift.core.errors import DigestMismatch, RecordError, SchemaMismatch
from zerodrift.records.directory import (
    CONFIG,
    ROLLOUTS,
    SEALED,
    TOKENS,
    VERDICT,
    check_new,
    new_directory,
    read_verdict,
    write_verdict,
)
from zerodrift.records.preflight import (
    PREFLIGHT,
    PREFLIGHT_SEAL,
    Item,
    PreflightRecord,
    Status,
    read_preflight,
    worst,
    write_preflight,
)
from zerodrift.records.rewards import Rewards
from zerodrift.records.seal import SEAL
from zerodrift.records.verdict import CauseFound, Outcome, VerdictRecord

CHECKLIST = PreflightRecord(
    status=Status.WARN,
    config="run.yaml",
    engine="exact",
    model="testbed:llama",
    items=(Item(name="doctor", status=Status.WARN, message="1 risk", facts={"n": 1}, type=("do it",)),),
    rewards=Rewards(task="sums", mean=0.9, std=0.1, n=100, when="2026-11-15"),
)


def test_a_verdict_is_written_for_people_read_back_and_replaced(tmp_path, record):
    assert write_verdict(tmp_path, record) == tmp_path / VERDICT
    text = (tmp_path / VERDICT).read_text(encoding="utf-8")
    assert text.startswith('{\n  "schema": "zerodrift.verdict/2",\n  "verdict": "PASS"')
    assert text.endswith("}\n")
    assert read_verdict(tmp_path) == record
    other = msgspec.structs.replace(record, message="Twice.")
    write_verdict(tmp_path, other)
    assert read_verdict(tmp_path) == other
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [SEAL, VERDICT]


def test_what_was_edited_after_the_run_is_not_believed(tmp_path, record):
    for name in (CONFIG, TOKENS):
        (tmp_path / name).write_text("as it was")
    write_verdict(tmp_path, record)
    assert read_verdict(tmp_path, (VERDICT, *SEALED)) == record
    (tmp_path / CONFIG).write_text("edited")
    assert read_verdict(tmp_path) == record, "the verdict itself is as it was"
    for spoil in (
        lambda: None,
        (tmp_path / CONFIG).unlink,
        lambda: ((tmp_path / CONFIG).write_text("as it was"), (tmp_path / ROLLOUTS).write_text("new")),
    ):
        spoil()
        with pytest.raises(DigestMismatch):
            read_verdict(tmp_path, (VERDICT, *SEALED))


@pytest.mark.parametrize("spoil", ["edited", "unsealed"])
def test_an_edited_verdict_is_not_believed(tmp_path, record, spoil):
    path = write_verdict(tmp_path, record)
    if spoil == "edited":
        path.write_text(path.read_text().replace('"PASS"', '"FAIL"', 1))
    else:
        (tmp_path / SEAL).unlink()
    with pytest.raises(DigestMismatch):
        read_verdict(tmp_path)


@pytest.mark.parametrize(("name", "kind"), [(VERDICT, "verdict"), (PREFLIGHT, "preflight")])
def test_what_is_no_record_is_refused(tmp_path, name, kind):
    read = {VERDICT: read_verdict, PREFLIGHT: read_preflight}[name]
    ours = f'{{"schema": "zerodrift.{kind}/2"'.encode()
    damaged = [b"", b"{", b"[]", b"{}", b"\xff", b'{"schema": 1}', b'{"schema": "\xff"}']
    for content in (None, *damaged, ours + b"}", ours + b', "x": ' + b"[" * 100_000):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(RecordError) as caught:
            read(tmp_path)
        assert caught.value.code == "record/invalid"
    # Also where the other schema has other fields, as it will.
    (tmp_path / name).write_text(json.dumps({"schema": f"zerodrift.{kind}/9", "colour": "red"}))
    with pytest.raises(SchemaMismatch):
        read(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["floor", "metrics", "gates", "causes"])
def test_a_number_that_json_cannot_carry_is_refused_before_it_is_written(tmp_path, verdict, part, value):
    words = {"evidence": "", "fix": "", "found_by": "parity"}
    cause = CauseFound(cause="unexplained", gating=True, explained=0.5, interval=(value, 1.0), **words)
    changed: Any = (cause,) if part == "causes" else {"k3": value}
    with pytest.raises(RecordError):
        write_verdict(tmp_path, VerdictRecord(**{**verdict, part: changed}))
    assert not list(tmp_path.iterdir())


def test_a_new_directory_is_held_while_it_is_written(tmp_path):
    directory = tmp_path / "runs" / "new"
    check_new(directory)
    assert not directory.exists()
    with new_directory(directory), pytest.raises(RecordError), new_directory(directory):
        pass
    # A run that was killed leaves its lock file, which is nothing to lose.
    with new_directory(directory):
        (directory / VERDICT).touch()
    for taken in (directory, directory / VERDICT):
        with pytest.raises(RecordError):
            check_new(taken)
    with pytest.raises(RecordError), new_directory(directory):
        pass


def test_a_checklist_comes_back(tmp_path):
    write_preflight(tmp_path, CHECKLIST)
    assert read_preflight(tmp_path) == CHECKLIST
    # One that goes on is written, and sealed, anew.
    write_preflight(tmp_path, msgspec.structs.replace(CHECKLIST, reproduce="again"))
    assert read_preflight(tmp_path).reproduce == "again"


@pytest.mark.parametrize("spoil", ["edited", "unsealed"])
def test_a_checklist_that_was_altered_is_not_believed(tmp_path, spoil):
    path = write_preflight(tmp_path, CHECKLIST)
    if spoil == "edited":
        content = path.read_text()
        path.write_text(content.replace(f'"{CHECKLIST.status}"', f'"{Status.PASS}"'))
        assert path.read_text() != content
    else:
        (tmp_path / PREFLIGHT_SEAL).unlink()
    with pytest.raises(DigestMismatch, match="another --out"):
        read_preflight(tmp_path)


@pytest.mark.parametrize(
    ("statuses", "decides"),
    [
        ((), Status.SKIPPED),
        ((Status.SKIPPED, Status.PASS), Status.PASS),
        ((Status.PASS, Status.WARN, Status.SKIPPED), Status.WARN),
        ((Status.WARN, Status.INCONCLUSIVE, Status.PASS), Status.INCONCLUSIVE),
        ((Status.INCONCLUSIVE, Status.FAIL, Status.PASS), Status.FAIL),
    ],
)
def test_the_worst_decides(statuses, decides):
    assert worst(statuses) is decides


def test_exit_codes():
    assert {outcome: outcome.exit_code for outcome in Outcome} == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
    assert [status.exit_code for status in Status] == [1, 3, 0, 0, 0]

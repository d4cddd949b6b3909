from pathlib import Path

import pytest

from zerodrift.core.errors import RecordError, SchemaMismatch
from zerodrift.records.preflight import (
    PREFLIGHT,
    Item,
    PreflightRecord,
    Status,
    read_preflight,
    worst,
    write_preflight,
)
from zerodrift.records.rewards import Rewards


def record() -> PreflightRecord:
    return PreflightRecord(
        status=Status.WARN,
        config="run.yaml",
        engine="exact",
        model="testbed:llama",
        items=(Item(name="doctor", status=Status.WARN, says="1 risk", facts={"n": 1}, type=("do it",)),),
        rewards=Rewards(task="sums", mean=0.9, std=0.1, n=100, when="2026-11-15"),
        reproduce="zerodrift preflight run.yaml",
    )


def test_the_record_comes_back(tmp_path: Path) -> None:
    write_preflight(tmp_path, record())
    assert read_preflight(tmp_path) == record()


@pytest.mark.parametrize(
    ("statuses", "decides"),
    [
        ((), Status.SKIPPED),
        ((Status.SKIPPED, Status.SKIPPED), Status.SKIPPED),
        ((Status.SKIPPED, Status.PASS), Status.PASS),
        ((Status.PASS, Status.WARN, Status.SKIPPED), Status.WARN),
        ((Status.WARN, Status.INCONCLUSIVE, Status.PASS), Status.INCONCLUSIVE),
        ((Status.INCONCLUSIVE, Status.FAIL, Status.PASS), Status.FAIL),
    ],
)
def test_the_worst_decides(statuses: tuple[Status, ...], decides: Status) -> None:
    assert worst(statuses) is decides


def test_exit_codes() -> None:
    assert {status: status.exit_code for status in Status} == {
        Status.FAIL: 1,
        Status.INCONCLUSIVE: 3,
        Status.WARN: 0,
        Status.PASS: 0,
        Status.SKIPPED: 0,
    }


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, RecordError),
        (b"{", RecordError),
        (b'{"schema": "zerodrift.preflight/0"}', SchemaMismatch),
        (b'{"schema": "zerodrift.preflight/1"}', RecordError),
    ],
)
def test_what_is_no_preflight_is_refused(
    tmp_path: Path, content: bytes | None, error: type[Exception]
) -> None:
    if content is not None:
        (tmp_path / PREFLIGHT).write_bytes(content)
    with pytest.raises(error):
        read_preflight(tmp_path)

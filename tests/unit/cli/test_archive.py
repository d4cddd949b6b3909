"""`zerodrift archive`: what it prints for people and for programs, and what it says to bad input."""

import json
import math
import time

import pytest

from zerodrift.cli.main import main
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState, version_spans


def archive(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["archive", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def directory(tmp_path):
    """A healthy batch of step 3, and one of step 12 in quarantine."""
    rollout = {
        "prompt_token_ids": (1, 2),
        "token_ids": (77, 88, 99),
        "behavior_logprobs": (-0.5, math.nan, -0.25),
        "old_logprobs": (-0.75, -1.0, -0.5),
        "versions": version_spans([11, 11, 12]),
        "mask": (True, False, True),
        "environment": "maths",
    }
    with Archive(tmp_path / "archive", ArchiveSettings(healthy_one_in=1)) as writer:
        for step, state in ((3, BatchState.OK), (12, BatchState.QUARANTINE)):
            rollouts = (ArchivedRollout(id=f"{step}/a\x1b[2J", **rollout),)
            reasons = ("k3 \x1b[31m",) if state is BatchState.QUARANTINE else ()
            writer.append(ArchivedBatch(step=step, state=state, reasons=reasons, rollouts=rollouts))
    return tmp_path / "archive"


def listed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, object]]:
    assert archive("ls", *arguments, "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_ls(directory, capsys):
    rows = listed(capsys, directory)
    assert [(row["step"], row["state"], row["rollouts"], row["tokens"]) for row in rows] == [
        (3, "ok", 1, 3),
        (12, "quarantine", 1, 3),
    ]
    assert [row["step"] for row in listed(capsys, directory, "--state", "quarantine")] == [12]
    assert [row["step"] for row in listed(capsys, directory, "--steps", "0:5")] == [3]
    assert archive("ls", directory) == 0
    told = capsys.readouterr().out
    assert all(str(row["batch"])[:12] in told for row in rows)
    assert "\x1b[31m" not in told


def test_what_was_removed(directory, capsys, monkeypatch):
    kept = listed(capsys, directory)
    assert listed(capsys, directory, "--removed") == []
    later = time.time() + 90
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: later)
        Archive(directory, ArchiveSettings(max_age_s=60.0)).close()
    gone = listed(capsys, directory, "--removed")
    assert [(row["step"], row["state"], row["why"]) for row in gone] == [
        (3, "ok", "older than 60 s"),
        (12, "quarantine", "older than 60 s"),
    ]
    assert [row["step"] for row in listed(capsys, directory, "--removed", "--state", "ok")] == [3]
    assert archive("ls", directory, "--removed") == 0
    assert str(gone[0]["batch"])[:12] in capsys.readouterr().out
    assert {row["batch"] for row in gone} == {row["batch"] for row in kept}
    assert archive("show", directory, str(gone[0]["batch"])) == 2
    assert "older than 60 s" in capsys.readouterr().err


def test_show(directory, capsys):
    name = str(listed(capsys, directory, "--state", "quarantine")[0]["batch"])
    assert archive("show", directory, name[:10]) == 0
    told = capsys.readouterr().out
    assert name in told
    assert "segments/suspect-000002.parquet" in told
    assert "maths" in told
    assert "11+12" in told
    assert "\x1b" not in told
    # Mean over the two tokens in the loss: the NaN stands beside one that is not.
    assert "0.25" in told
    assert "77" not in told
    assert archive("show", directory, name[:10], "--tokens") == 0
    told = capsys.readouterr().out
    assert [line.split() for line in told.splitlines() if line.startswith(("0 ", "1 ", "2 "))] == [
        ["0", "77", "−0.5", "−0.75", "11", "yes"],
        ["1", "88", "nan", "−1", "11", "no"],
        ["2", "99", "−0.25", "−0.5", "12", "yes"],
    ]
    assert archive("show", directory, name, "--json") == 0
    batch = json.loads(capsys.readouterr().out)
    assert batch["rollouts"][0]["behavior_logprobs"] == [-0.5, None, -0.25]


def test_verify(directory, capsys):
    assert archive("verify", directory) == 0
    assert "2 of 2 batches" in capsys.readouterr().out
    path = directory / "segments" / "healthy-000001.parquet"
    path.write_bytes(path.read_bytes()[:-2])
    (directory / "journals" / "suspect-000009.journal").write_bytes(b"ZDJ1torn")
    assert archive("verify", directory) == 1
    told = capsys.readouterr().out
    assert "segments/healthy-000001.parquet" in told
    assert "record/digest" in told
    assert "suspect-000009.journal" in told
    assert "1 of 2 batches" in told
    assert archive("verify", directory, "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert [finding["where"] for finding in answer["damaged"]] == ["segments/healthy-000001.parquet"]
    assert len(answer["unfinished"]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "nowhere"],
        ["show", "nowhere", "ab"],
        ["verify", "nowhere"],
        ["show", "DIR", "zz"],
        ["ls", "DIR", "--steps", "a"],
    ],
)
def test_bad_input(directory, arguments, capsys):
    words = [str(directory) if word == "DIR" else word for word in arguments]
    assert archive(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error [")

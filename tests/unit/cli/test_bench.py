"""`zerodrift bench` on a model that takes moments: what it prints, what it writes, what it refuses."""

import json
import re
from pathlib import Path

import pytest
import torch

from zerodrift import models
from zerodrift.cli.main import main
from zerodrift.core.errors import EngineError


@pytest.fixture(autouse=True)
def _a_wide_terminal_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *map(str, arguments)])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_standings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    out = tmp_path / "new" / "it.json"
    options = ("--requests", 2, "--rounds", 2, "--shorten", 16, "--threads", 2, "--json", out)
    assert run("testbed:llama", *options) == 0
    assert asked[0] == 2, "proofs set it as well, later"
    said = capsys.readouterr()
    assert said.err == ""
    names = ["exact", "unconstrained", "unconstrained, F.linear"]
    assert re.findall(r"│ ([\w,. ]+?) +│ +[\d.]+ \(", said.out) == names
    written = json.loads(out.read_text())
    assert (written["schema"], written["requests"], written["rounds"]) == (2, 2, 2)
    assert written["output_tokens"] <= 2 * 16
    assert [len(each["tokens_per_second"]) for each in written["standings"]] == [2, 2, 2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("nowhere", "--vllm", "no/such/python"),
        ("testbed:qwen3", "--vllm", "python"),
        ("nowhere",),
        ("--requests", 0),
    ],
)
def test_what_cannot_be_measured(arguments: tuple[object, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr().err


def test_whoever_was_started_is_ended_when_another_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []

    class Fails:
        name, setting = "vllm", "fails"

        def __init__(self, python: str, model: Path, log: Path, *, threads: int, eager: bool) -> None:
            assert (model, eager) == (tmp_path, True)

        def run(self, jobs: object) -> None:
            raise EngineError("it broke")

        def close(self) -> None:
            closed.append(self.name)

    tiny = models.load("testbed:llama")
    monkeypatch.setattr("zerodrift.bench.contenders.VllmContender", Fails)
    monkeypatch.setattr(models, "load", lambda _: tiny)
    options = ("--vllm", "python3", "--vllm-eager", "--requests", 1, "--shorten", 16, "--rounds", 1)
    assert run(tmp_path, *options) == 3
    assert closed == ["vllm"]
    assert "it broke" in capsys.readouterr().err

"""`zerodrift bench` on a model that takes moments: what it prints, what it writes, what it refuses."""

import json
import re

import pytest
import torch

from zerodrift.cli.main import main


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *map(str, arguments)])
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize("as_json", [False, True])
def test_standings(capsys, monkeypatch, as_json):
    monkeypatch.setenv("COLUMNS", "200")
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    options = ("--requests", 2, "--rounds", 2, "--shorten", 16, "--threads", 2, *(["--json"] * as_json))
    assert run("testbed:llama", "--engine", "reference", *options) == 0
    assert asked[0] == 2, "proofs set it as well, later"
    said = capsys.readouterr()
    assert said.err == ""
    names = ["exact", "unconstrained", "unconstrained, F.linear", "reference"]
    if not as_json:
        assert re.findall(r"│ ([\w,. ]+?) +│ +[\d.]+ \(", said.out) == names
        return
    written = json.loads(said.out)
    assert (written["schema"], written["requests"], written["rounds"]) == (2, 2, 2)
    assert written["output_tokens"] <= 2 * 16
    assert [len(each["tokens_per_second"]) for each in written["standings"]] == [2] * 4


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--url http://127.0.0.1:9", "config/invalid"),
        ("--engine exact", "config/invalid"),
        ("--engine reference --set model.dtype=bfloat16", "config/invalid"),
        ("--engine vlm", "config/invalid"),
        ("--engine vllm --set engine.python=python", "model/not-found"),
        ("nowhere --engine reference", "model/not-found"),
        ("nowhere", "model/not-found"),
    ],
)
def test_what_cannot_be_measured(arguments, code, capsys):
    assert run(*arguments.split()) == 2
    assert f"error [{code}]" in capsys.readouterr().err


def test_more_requests_than_memory_has_room_for_are_refused(capsys):
    assert run("testbed:llama", "--requests", 99_999_999_999) == 2
    assert "--requests" in capsys.readouterr().err


def test_a_server_that_nobody_answers_for(capsys):
    assert run("--engine", "vllm", "--url", "http://127.0.0.1:9") == 3
    assert "error [engine/unreachable]" in capsys.readouterr().err

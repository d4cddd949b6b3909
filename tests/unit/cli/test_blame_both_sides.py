"""`zerodrift blame` on what NeMo-RL writes and on an archive: both sides' logprobs are read, and tell the sides apart."""

import json
from pathlib import Path
from typing import Any

import pytest

from zerodrift.cli.main import main
from zerodrift.records.directory import read_verdict
from zerodrift.records.verdict import VerdictRecord


@pytest.fixture(scope="module")
def example(script):
    return script("reliability/archive_example")


@pytest.fixture(scope="module")
def sampled(example):
    made: list[Any] = example.sample()
    return made


def blamed(dump: Path, out: Path, *options: str) -> VerdictRecord:
    words = [
        "blame",
        str(dump),
        "--model",
        "testbed:llama",
        "--precision",
        "fp32",
        "--out",
        str(out),
        *options,
    ]
    with pytest.raises(SystemExit):
        main(words)
    return read_verdict(out)


def as_nemo_rl(rollout: Any, guilty: str) -> str:
    silent = [0.0] * len(rollout.prompt)
    line = {
        "token_ids": [[*rollout.prompt, *rollout.output]],
        "token_loss_mask": [[0] * len(silent) + [1] * len(rollout.output)],
        "input_lengths": [len(silent) + len(rollout.output)],
        "generation_logprobs": [[*silent, *rollout.numbers(good=guilty != "engine")]],
        "prev_logprobs": [[*silent, *rollout.numbers(good=guilty != "trainer")]],
    }
    return json.dumps(line) + "\n"


@pytest.mark.parametrize("guilty", ["engine", "trainer"])
def test_nemo_rl(sampled, tmp_path, guilty):
    dump = tmp_path / "dump"
    dump.mkdir()
    for step in sorted({rollout.step for rollout in sampled}):
        lines = "".join(as_nemo_rl(rollout, guilty) for rollout in sampled if rollout.step == step)
        (dump / f"train_data_step{step}.jsonl").write_text(lines)
    record = blamed(dump, tmp_path / "run", "--temperature", "0.7")
    assert record.guilty == guilty
    if guilty == "engine":
        assert record.to_fix[0].cause == "semantic/raw-logprobs"


@pytest.mark.parametrize("guilty", ["engine", "trainer"])
def test_an_archive(example, sampled, tmp_path, guilty, capsys):
    example.write(sampled, tmp_path / "archive", guilty)
    record = blamed(tmp_path / "archive", tmp_path / "run")
    assert record.guilty == guilty
    assert f"\nsince  step {example.BAD_FROM}" in capsys.readouterr().out
    if guilty == "engine":
        assert record.to_fix[0].cause == "semantic/raw-logprobs"


@pytest.mark.parametrize("part", [("--state", "ok"), ("--steps", "0:2")])
def test_the_sound_part_of_an_archive(example, sampled, tmp_path, part):
    example.write(sampled, tmp_path / "archive")
    assert blamed(tmp_path / "archive", tmp_path / "run", *part).guilty == "none"

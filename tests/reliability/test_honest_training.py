"""`honest_training.py`: it goes on where it was stopped, and what it records is what it judged."""

import json
from dataclasses import replace

import pytest


@pytest.fixture
def honest(script, monkeypatch):
    module = script("reliability/honest_training")
    small = replace(module.TRAININGS["qwen2-bf16-lag2"], prompts=4, samples=2, limit=4)
    monkeypatch.setitem(module.TRAININGS, "small", small)
    monkeypatch.setattr(module, "KEPT_EVERY", 2)
    return module


def test_it_goes_on_where_it_stopped_and_records_what_it_judged(honest, tmp_path):
    honest.train("small", tmp_path, 3, "cpu")
    kept = [json.loads(line) for line in (tmp_path / "small" / "steps.jsonl").read_text().splitlines()]
    (tmp_path / "small" / "kept-3" / "done").unlink()  # as a kill would leave it
    (tmp_path / "small" / "kept-2").mkdir(exist_ok=True)
    honest.train("small", tmp_path, 4, "cpu")
    lines = [json.loads(line) for line in (tmp_path / "small" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    same = ("step", "state", "mean_abs", "entropy", "length", "reward")
    assert [{key: line[key] for key in same} for line in lines[: len(kept)]] == [
        {key: line[key] for key in same} for line in kept
    ]
    again = honest.judged("small", tmp_path)
    assert [line["mean_abs"] for line in again] == [line["mean_abs"] for line in lines]
    assert honest.summary("small", again)["states"] == honest.summary("small", lines)["states"]

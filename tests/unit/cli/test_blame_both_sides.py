"""`zerodrift blame` on what NeMo-RL writes and on an archive: both sides' logprobs are read, and tell the sides apart."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.cli.main import main
from zerodrift.core.completion import LogprobKind
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState, version_spans
from zerodrift.records.directory import read_verdict
from zerodrift.records.verdict import VerdictRecord

MODEL = "testbed:llama"
STEPS, BAD_FROM = 6, 3
SAMPLING = SamplingParams(temperature=0.7, max_tokens=20)


class Sampled(NamedTuple):
    """A rollout at temperature 0.7 with the numbers it should have and those of raw logits."""

    step: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    right: tuple[float, ...]
    raw: tuple[float, ...]

    def of(self, *, good: bool) -> tuple[float, ...]:
        return self.right if good or self.step < BAD_FROM else self.raw


@pytest.fixture(scope="module")
def sampled() -> list[Sampled]:
    requests = [
        Request(Prompt((0, 5 + number, 40)), SamplingParams(temperature=0.7, max_tokens=20, seed=number))
        for number in range(5 * STEPS)
    ]
    right = ReferenceBackend(MODEL, dtype="float32").generate(requests)
    raw = ReferenceBackend(MODEL, dtype="float32", kind=LogprobKind.RAW).generate(requests)
    made = []
    for number, (request, one, other) in enumerate(zip(requests, right, raw, strict=True)):
        assert one.completions[0].token_ids == other.completions[0].token_ids
        output = one.completions[0].token_ids
        numbers = one.completions[0].logprobs, other.completions[0].logprobs
        made.append(Sampled(number // 5, request.prompt.token_ids, output, *numbers))
    return made


def blamed(dump: Path, out: Path, *options: str) -> VerdictRecord:
    with pytest.raises(SystemExit):
        main(["blame", str(dump), "--model", MODEL, "--precision", "fp32", "--out", str(out), *options])
    return read_verdict(out)


@pytest.mark.parametrize("guilty", ["engine", "trainer"])
def test_nemo_rl(sampled: list[Sampled], tmp_path: Path, guilty: str) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    for step in range(STEPS):
        lines = []
        for rollout in (each for each in sampled if each.step == step):
            silent = [0.0] * len(rollout.prompt)
            line = {
                "token_ids": [[*rollout.prompt, *rollout.output]],
                "token_loss_mask": [[0] * len(silent) + [1] * len(rollout.output)],
                "input_lengths": [len(silent) + len(rollout.output)],
                "generation_logprobs": [[*silent, *rollout.of(good=guilty != "engine")]],
                "prev_logprobs": [[*silent, *rollout.of(good=guilty != "trainer")]],
            }
            lines.append(json.dumps(line) + "\n")
        (dump / f"train_data_step{step}.jsonl").write_text("".join(lines))
    record = blamed(dump, tmp_path / "run", "--temperature", "0.7")
    assert record.guilty == guilty
    if guilty == "engine":
        assert record.to_fix[0].cause == "semantic/raw-logprobs"


def archive_of(sampled: list[Sampled], directory: Path, guilty: str) -> None:
    with Archive(directory, ArchiveSettings(healthy_one_in=1)) as archive:
        for step in range(STEPS):
            rollouts = tuple(
                ArchivedRollout(
                    id=f"{step}/{number}",
                    prompt_token_ids=rollout.prompt,
                    token_ids=rollout.output,
                    behavior_logprobs=tuple(rollout.of(good=guilty != "engine")),
                    old_logprobs=tuple(rollout.of(good=guilty != "trainer")),
                    versions=version_spans([step] * len(rollout.output)),
                    sampling=SAMPLING,
                    stated=("temperature",),
                )
                for number, rollout in enumerate(each for each in sampled if each.step == step)
            )
            state = BatchState.OK if step < BAD_FROM else BatchState.QUARANTINE
            archive.append(
                ArchivedBatch(step=step, state=state, trainer_version=str(step), rollouts=rollouts)
            )


@pytest.mark.parametrize("guilty", ["engine", "trainer"])
def test_an_archive(
    sampled: list[Sampled], tmp_path: Path, guilty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    archive_of(sampled, tmp_path / "archive", guilty)
    record = blamed(tmp_path / "archive", tmp_path / "run")
    assert record.guilty == guilty
    assert f"\nsince  step {BAD_FROM}" in capsys.readouterr().out
    if guilty == "engine":
        assert record.to_fix[0].cause == "semantic/raw-logprobs"


def test_a_part_of_an_archive(sampled: list[Sampled], tmp_path: Path) -> None:
    archive_of(sampled, tmp_path / "archive", "engine")
    assert blamed(tmp_path / "archive", tmp_path / "ok", "--state", "ok").guilty == "none"
    assert blamed(tmp_path / "archive", tmp_path / "early", "--steps", "0:2").guilty == "none"

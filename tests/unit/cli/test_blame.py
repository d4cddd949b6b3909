import json
import re
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from zerodrift import models
from zerodrift.audit.blame import JUDGED
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.cli import blame as module
from zerodrift.cli.blame import step_range
from zerodrift.cli.main import main
from zerodrift.core.completion import LogprobKind
from zerodrift.core.errors import ConfigError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.codec import read_lines
from zerodrift.records.directory import new_directory, read_verdict
from zerodrift.records.recorded import JudgedRollout
from zerodrift.records.tokens import read_tokens
from zerodrift.records.verdict import Outcome, VerdictRecord

MODEL = "testbed:llama"


def blame(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["blame", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture(scope="module")
def rows():
    """Rollouts at temperature 0.7 with raw logprobs from the eleventh on."""
    requests = [
        Request(Prompt((0, 5 + number, 40)), SamplingParams(temperature=0.7, max_tokens=20, seed=number))
        for number in range(30)
    ]
    sound = ReferenceBackend(MODEL, dtype="float32").generate(requests[:10])
    raw = ReferenceBackend(MODEL, dtype="float32", kind=LogprobKind.RAW).generate(requests[10:])
    return [
        {
            "prompt_token_ids": request.prompt.token_ids,
            "token_ids": answer.completions[0].token_ids,
            "logprobs": answer.completions[0].logprobs,
        }
        for request, answer in zip(requests, [*sound, *raw], strict=True)
    ]


@pytest.fixture(scope="module")
def sound():
    """Rollouts at temperature 0.7, which they do not state."""
    requests = [
        Request(
            Prompt((0, 5 + number, 40)),
            SamplingParams(temperature=0.7, max_tokens=20, seed=number, ignore_eos=True),
        )
        for number in range(30)
    ]
    return [
        {
            "prompt_token_ids": request.prompt.token_ids,
            "token_ids": answer.completions[0].token_ids,
            "logprobs": answer.completions[0].logprobs,
        }
        for request, answer in zip(
            requests, ReferenceBackend(MODEL, dtype="float32").generate(requests), strict=True
        )
    ]


def test_the_whole_way(rows, tmp_path, capsys, monkeypatch):
    dump, out = tmp_path / "dump.jsonl", tmp_path / "run"
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", MODEL, "--temperature", "0.7", "--precision", "fp32", "--engine", "vllm"]
    arguments = [str(dump), *options, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["zerodrift", "blame", *arguments])
    assert blame(*arguments) == 1
    told = capsys.readouterr().out
    assert "semantic/raw-logprobs" in told
    assert "--logprobs-mode processed_logprobs" in told
    # Who and since when is what one asked.
    assert re.match(r"FAIL .*\nside   engine: .*\nsince  ", told)
    # There are no steps: blocks of lines with 200 tokens stand in, and the second begins at line eleven.
    assert re.search(r"\nsince  line 11: 20 of 20 rollouts ", told)
    assert "\ngates  fp32" in told
    record = read_verdict(out)
    assert (record.verdict, record.guilty) == (Outcome.FAIL, "engine")
    assert "temperature" not in {probe.name: probe.message for probe in record.probes}["parameters"]
    # In a directory of its own.
    assert record.reproduce == shlex.join(["zerodrift", "blame", str(dump), *options])
    assert (out / "report.html").is_file()
    assert (out / "environment.json").is_file()
    judged = list(read_lines(out / JUDGED, JudgedRollout))
    assert [row.line for row in judged] == list(range(1, 31))
    assert read_tokens(out / "tokens.parquet").num_rows == sum(row.tokens for row in judged)


def typed(told: str) -> list[list[str]]:
    """The arguments of every command that was printed."""
    return [shlex.split(line)[2:] for line in told.splitlines() if line.startswith("    zerodrift blame ")]


@pytest.mark.parametrize(
    ("change", "options", "verdicts"),
    [
        ({}, [], [0]),
        ({"logprobs": "slightly off"}, [], [0, 1]),
        ({"token_ids": "few"}, [], [3]),
    ],
    ids=["temperature", "precision", "too little"],
)
def test_what_is_printed_runs_as_it_is_printed(
    change, options, verdicts, sound, tmp_path, capsys, monkeypatch
):
    rows = [dict(row) for row in sound]
    if change.get("token_ids"):
        rows = rows[:1]
    if change.get("logprobs"):
        options = ["--temperature", "0.7"]
        rows = [
            {
                **row,
                "logprobs": [min(0.0, value + 0.01 * (-1) ** i) for i, value in enumerate(row["logprobs"])],
            }
            for row in rows
        ]
    monkeypatch.chdir(tmp_path)
    Path("my dump.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["my dump.jsonl", "--model", MODEL, *options, "--out", "run"]
    monkeypatch.setattr(sys, "argv", ["zerodrift", "blame", *arguments])
    assert blame(*arguments) == 3
    again = typed(capsys.readouterr().out)
    assert len(again) == len(verdicts)
    for number, words in enumerate(again):
        # The directory of a run is named by the second.
        monkeypatch.setattr(module, "RUNS", tmp_path / str(number))
        assert blame(*words) == verdicts[number]


def test_a_checkpoint_without_a_tokenizer(sound, tmp_path, capsys):
    checkpoint = models.materialise(MODEL, tmp_path / "checkpoint")
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    dump = tmp_path / "dump.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in sound))
    options = ["--model", str(checkpoint), "--temperature", "0.7", "--out", str(tmp_path / "run")]
    assert blame(str(dump), *options) == 0
    assert "no tokenizer" in capsys.readouterr().err
    assert read_tokens(tmp_path / "run" / "tokens.parquet").num_rows == 600


def test_one_checkpoint_per_step_and_json(sound, tmp_path, capsys):
    models.materialise(MODEL, tmp_path / "step_3")
    dump, out = tmp_path / "dump.jsonl", tmp_path / "run"
    dump.write_text("".join(json.dumps({**row, "step": 3 + i // 15}) + "\n" for i, row in enumerate(sound)))
    arguments = [str(dump), "--model", f"{tmp_path}/step_{{step}}", "--temperature", "0.7", "--out", str(out)]
    # Step 4 has none: refused by name, with what is there, before anything is loaded.
    assert blame(*arguments) == 2
    told = capsys.readouterr().err
    assert "error [model/not-found]" in told
    assert f"{tmp_path}/step_4" in told
    assert f"{tmp_path}/step_3" in told
    assert not out.exists()
    assert blame(*arguments, "--steps", "3", "--previous", MODEL) == 2
    capsys.readouterr()
    assert blame(*arguments, "--steps", "3", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    record = msgspec.convert(
        {name: value for name, value in answer.items() if name in VerdictRecord.__struct_fields__},
        VerdictRecord,
    )
    assert record == read_verdict(out)
    assert record.model == f"{tmp_path}/step_{{step}}"
    assert answer.keys() - set(VerdictRecord.__struct_fields__) == {"directory", "commands"}
    assert (answer["side"].partition(":")[0], answer["since"]) == ("none", "nothing to date")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_ids": [99_999] * 20}, "dump.jsonl, line 2: output ids hold 99999"),
        ({"prompt_token_ids": [5] * 2000}, "dump.jsonl, line 2: prompt and output are 2020 tokens"),
    ],
)
def test_a_bad_dump_is_refused_before_anything_is_loaded(rows, tmp_path, capsys, change, says):
    dump = tmp_path / "dump.jsonl"
    dump.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1] | change) + "\n")
    assert blame(str(dump), "--model", MODEL, "--out", str(tmp_path / "run")) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("--temperature nan", "value/sampling"),
        ("--top-p 2", "value/sampling"),
        ("--top-k -3", "value/sampling"),
        ("--min-p 1", "value/sampling"),
        ("--previous nowhere", "model/not-found"),
        ("--previous testbed:lama", "model/not-found"),
        ("--engine banana", "config/invalid"),
        ("--steps 3-9", "config/invalid"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_before_the_dump_is_read(options, code, tmp_path, capsys):
    # There is no dump: whoever looks for it first complains about that.
    arguments = [str(tmp_path / "nowhere.jsonl"), "--model", MODEL, "--out", str(tmp_path / "run")]
    assert blame(*arguments, *options.split()) == 2
    assert f"error [{code}]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_nothing_is_overwritten_and_nobody_else_is_disturbed(rows, tmp_path, capsys):
    out, dump = tmp_path / "checkpoint", tmp_path / "dump.jsonl"
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert blame(str(tmp_path / "nowhere.jsonl"), "--model", MODEL, "--out", str(out)) == 2
    assert [path.name for path in out.iterdir()] == ["config.json"]
    dump.write_text(json.dumps(rows[0]) + "\n")
    with new_directory(tmp_path / "run"):
        assert blame(str(dump), "--model", MODEL, "--out", str(tmp_path / "run")) == 2
    assert "another process is writing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        (None, (None, None)),
        ("3:9", (3, 9)),
        ("3:", (3, None)),
        (":9", (None, 9)),
        ("7", (7, 7)),
        ("0:0", (0, 0)),
    ],
)
def test_ranges_of_steps(text, bounds):
    assert step_range(text) == bounds


@pytest.mark.parametrize("text", ["", ":", "a:b", "-1:3", "3-9"])
def test_other_words_are_no_range(text):
    with pytest.raises(ConfigError):
        step_range(text)

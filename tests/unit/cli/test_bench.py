"""`zerodrift bench` on a model that takes moments: what it prints, what it writes, what it refuses."""

import json
import re
from pathlib import Path

import pytest
import torch

from zerodrift.bench import load, shape
from zerodrift.bench.throughput import TARGETS
from zerodrift.bench.vllm import Mode, Start
from zerodrift.cli import bench
from zerodrift.cli.main import main
from zerodrift.core.errors import EngineError


@pytest.fixture(autouse=True)
def _one_model_of_moments(tiny_bench: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def tiny_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No trained weights here, and SmolLM2's shape in small."""
    small = {
        **shape.SMOLLM2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 61,
        "head_dim": 16,
    }
    monkeypatch.setattr(shape, "SMOLLM2", small)
    monkeypatch.chdir(tmp_path)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *map(str, arguments)])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_the_names_have_targets() -> None:
    assert set(bench.ContenderName) == {"exact", *TARGETS}


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "it.json"
    assert run("throughput", "--requests", 2, "--rounds", 2, "--json", out) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert re.findall(r"│ (\w+) +│ +[\d.]+ \(", said.out) == ["exact", "unconstrained", "transformers"]
    assert shape.RANDOM in said.out
    assert "≥ 0.95" in said.out
    written = json.loads(out.read_text())
    assert (written["schema"], written["requests"], written["rounds"]) == (1, 2, 2)
    assert [len(each["tokens_per_second"]) for each in written["standings"]] == [2, 2, 2]
    assert run("throughput", "--requests", 2, "--shorten", 100, "--only", "exact", "--json", out) == 0
    assert json.loads(out.read_text())["output_tokens"] <= 4


def test_only_some(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    arguments = ("--requests", 1, "--rounds", 1, "--only", "transformers", "--threads", 2)
    assert run("throughput", "testbed:llama", *arguments) == 0
    assert asked == [2]
    said = capsys.readouterr().out
    assert f"testbed:llama, fp32, {torch.get_num_threads()} threads: 1 requests" in said
    assert "exact " not in said.replace("exact is", "")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--only", "vllm"), 2, "--only vllm and --vllm PYTHON"),
        (("--only", "exact", "--vllm", "python"), 2, "vLLM would take no part"),
        (("--vllm", "no/such/python"), 2, "no program that can be run"),
        (("testbed:qwen3", "--vllm", "python", "--only", "vllm"), 2, "vLLM loads weights from a directory"),
        (("--vllm", "python", "--only", "vllm"), 2, "vLLM loads weights from a directory"),
        (("nowhere",), 2, "there is no directory 'nowhere'"),
        (("--requests", 0), 2, "Invalid value for '--requests'"),
    ],
)
def test_what_cannot_be_measured(
    arguments: tuple[object, ...], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("throughput", *arguments) == code
    assert says in " ".join(capsys.readouterr().err.split())


def test_whoever_was_started_is_ended_when_another_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []

    class Fails:
        name, setting = "vllm", "fails"

        def __init__(self, start: Start, log: Path) -> None:
            assert (start.model, start.mode) == (tmp_path, Mode.EAGER)

        def run(self, jobs: object) -> None:
            raise EngineError("it broke")

        def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr("zerodrift.bench.vllm.VllmContender", Fails)
    monkeypatch.setattr(shape, "load", lambda _: shape.random_weights(shape.SMOLLM2))
    assert (
        run("throughput", tmp_path, "--vllm", "python", "--vllm-eager", "--only", "vllm", "--requests", 1)
        == 3
    )
    assert closed == ["vllm"]
    assert "it broke" in capsys.readouterr().err


def test_load(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "load.json"
    assert run("load", "--rounds", 1, "--json", out) == 0
    said = capsys.readouterr().out
    assert re.findall(r"│ +(\d+) │", said) == ["1", "4", "16", "64", "256"]
    assert re.search(
        r"at 256: [\d.]+ × the cheapest \(at most 1.1; by processor time [\d.]+\), bookkeeping", said
    )
    assert "KV: 0.5 MiB by arithmetic, resident" in said
    assert [cost["concurrent"] for cost in json.loads(out.read_text())["costs"]] == list(load.LOADS)
    monkeypatch.setattr(load, "RESIDENT", tmp_path / "none")
    assert run("load", "--rounds", 1) == 0
    assert "resident not measured here" in capsys.readouterr().out

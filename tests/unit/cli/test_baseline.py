"""`zerodrift baseline record`: what it writes, and what it says to bad input before it has done any work."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from zerodrift.cli.main import main
from zerodrift.models.export import materialise
from zerodrift.records.baseline import read_header, read_rows


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["baseline", "record", *map(str, arguments)])
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture(scope="module")
def _files(tmp_path_factory):
    return materialise("testbed:llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(_files, tmp_path):
    """A model directory of one's own, to damage."""
    directory = tmp_path / "model"
    directory.mkdir()
    for path in _files.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


def test_a_recording_and_its_resumption(model, tmp_path, capsys):
    out = tmp_path / "new" / "base.jsonl"
    arguments = (
        model,
        *["--num-prompts", "6", "--max-tokens", "4", "--temperature", "0.8", "--seed", "3", "--out"],
        out,
    )
    assert run(*arguments) == 0
    said = capsys.readouterr()
    header, rows = read_header(out), list(read_rows(out))
    assert said.out == f"{out}: 6 rows (6 new) of {model}, weights {header.weights}\n"
    assert said.err == ""
    assert [row.index for row in rows] == list(range(6))
    assert header.sampling.temperature == 0.8
    assert all(1 <= len(row.output) <= 4 for row in rows)
    content = out.read_bytes()
    out.write_bytes(content[: content.rindex(b"\n", 0, -1) + 20])
    assert run(*arguments) == 0
    assert "6 rows (1 new)" in capsys.readouterr().out
    assert out.read_bytes() == content


def test_prompts_of_a_file(model, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The keeper"}\n{"prompt": [9, 8]}\n')
    out = tmp_path / "base.jsonl"
    assert run(model, "--prompts", prompts, "--out", out, "--max-tokens", 2) == 0
    assert [row.prompt for row in read_rows(out)][1] == (9, 8)
    assert "2 rows (2 new)" in capsys.readouterr().out


def truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def pointing_outside(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory.parent / "model.safetensors")
    names = dict.fromkeys(load_file(directory.parent / "model.safetensors"), "../model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def of_another_kind(directory: Path) -> None:
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), "model_type": "novel", "architectures": ["NovelForCausalLM"]}
    path.write_text(json.dumps(config))


BAD_MODELS: dict[Callable[[Path], object], str] = {
    lambda directory: (directory / "model.safetensors").unlink(): "model/no-weights",
    lambda directory: (directory / "config.json").unlink(): "model/unsupported",
    lambda directory: (directory / "config.json").write_text("{"): "model/invalid",
    truncated: "model/truncated-weights",
    pointing_outside: "model/unsafe-path",
    of_another_kind: "model/unsupported",
}


def check_refusal(capsys: pytest.CaptureFixture[str], code: str, says: str = "") -> None:
    """One paragraph on stderr, with its code; nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error [{code}] "), err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("damage", "code"), BAD_MODELS.items(), ids=BAD_MODELS.values())
def test_a_bad_model(model, tmp_path, capsys, damage, code):
    damage(model)
    out = tmp_path / "base.jsonl"
    assert run(model, "--out", out) == 2
    check_refusal(capsys, code)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (None, "record/invalid", "prompts.jsonl"),
        (b"", "record/invalid", "prompts.jsonl"),
        (b"oops\n", "record/invalid", "prompts.jsonl, line 1: "),
        (b'{"prompt": [3]}\n{"text": "hi"}\n', "record/invalid", "prompts.jsonl, line 2: "),
        (b"\xff\xfe\n", "record/invalid", "prompts.jsonl, line 1: "),
        (b'{"prompt": [512]}\n', "value/prompt", "prompts.jsonl, line 1: prompt[0] is 512"),
        (b'{"messages": [{"role": "user"}]}\n', "record/invalid", "line 1: "),
    ],
)
def test_bad_prompts(tmp_path, capsys, content, code, says):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "base.jsonl"
    if content is not None:
        prompts.write_bytes(content)
    # A file that is missing is missed before the model is looked for: loading may take minutes.
    assert (
        run("testbed:llama" if content is not None else "no/such/model", "--prompts", prompts, "--out", out)
        == 2
    )
    check_refusal(capsys, code, says)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("--temperature -1", "value/sampling"),
        ("--temperature nan", "value/sampling"),
        ("--max-tokens 0", "value/sampling"),
        ("--max-tokens 1024", "value/sampling"),
        ("--num-prompts 0", "value/prompt"),
        ("--prompts two.jsonl --num-prompts 0", "value/prompt"),
        (f"--seed {2**63}", "value/sampling"),
    ],
)
def test_bad_options(tmp_path, capsys, monkeypatch, options, code):
    monkeypatch.chdir(tmp_path)
    Path("two.jsonl").write_text('{"prompt": [9, 8]}\n')
    assert run("testbed:llama", *options.split(), "--out", "base.jsonl") == 2
    check_refusal(capsys, code)
    assert not Path("base.jsonl").exists()


@pytest.mark.parametrize("where", [".", "file/base.jsonl"])
def test_a_place_that_cannot_be_written(tmp_path, capsys, where):
    (tmp_path / "file").write_text("x")
    assert run("testbed:llama", "--out", tmp_path / where, "--num-prompts", 1, "--max-tokens", 1) == 2
    check_refusal(capsys, "record/invalid", "cannot be written")


def test_a_file_that_is_no_baseline_is_kept(tmp_path, capsys):
    out = tmp_path / "notes.txt"
    out.write_text("precious")
    assert run("testbed:llama", "--out", out, "--num-prompts", 1, "--max-tokens", 1) == 2
    check_refusal(capsys, "record/invalid", "notes.txt")
    assert out.read_text() == "precious"

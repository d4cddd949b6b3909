import json

import pytest

from zerodrift.cli.main import main

SECRET = "sk-very-secret-indeed-it-is"
RAW = "vllm serve Q --no-async-scheduling"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_exit_codes(tmp_path, capsys):
    assert run(RAW) == 1
    assert run(f"{RAW} --logprobs-mode processed_logprobs") == 0
    assert run(f"{RAW} --logprobs-mode $MODE") == 3
    assert run("ls -l") == 2
    assert run("http://127.0.0.1:9") == 3
    assert run(str(tmp_path / "none.yaml")) == 2
    assert "[config/invalid] there is no file" in capsys.readouterr().err


def test_the_temperature_can_be_told(capsys):
    assert run(RAW, "--temperature", "1.0") == 0
    assert run(RAW, "--temperature", "0.7") == 1
    assert run(RAW, "--temperature", "0.7", "--all") == 1
    assert "asked" in capsys.readouterr().out


@pytest.mark.parametrize("temperature", ["-1", "nan", "inf", "2.5"])
def test_a_temperature_that_vllm_refuses(temperature, capsys):
    assert run(RAW, "--temperature", temperature) == 2
    assert "vLLM samples at 0 to 2" in capsys.readouterr().err


def test_json(capsys):
    assert run(RAW, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == 1
    first = found["findings"][0]
    assert first["rule"] == "raw-logprobs"
    assert first["type"] == ["--logprobs-mode processed_logprobs"]
    assert {"severity", "message", "cause", "source", "do", "setting", "value"} <= set(first)
    fine = next(row for row in found["settings"] if row["severity"] == "fine")
    assert fine["message"]


def test_what_a_fix_brings_into_force_is_fixed_too(tmp_path, capsys):
    """A correction that is turned on multiplies ratios over whole sequences, unless it is told otherwise."""
    path = tmp_path / "trl.yaml"
    path.write_text(
        "use_vllm: true\nvllm_mode: colocate\nmax_completion_length: 2048\nvllm_importance_sampling_correction: false\n"
    )
    run(str(path), "--fix-risks")
    fixed, err = capsys.readouterr()
    assert "vllm_importance_sampling_correction: true" in fixed
    assert "vllm_importance_sampling_mode: token_truncate" in fixed
    assert "correction mode" not in err.partition("at risk")[2]
    path.write_text(fixed)
    run(str(path), "--fix-risks")
    again, err = capsys.readouterr()
    assert again == fixed
    assert "changed:" not in err


def test_fix_prints_the_command_and_nothing_else(capsys):
    assert run(RAW, "--fix") == 0
    out, err = capsys.readouterr()
    assert out == f"{RAW} --logprobs-mode processed_logprobs\n"
    assert err.splitlines()[0] == "changed: --logprobs-mode processed_logprobs"
    assert len(err.splitlines()) == 2, "what is at risk is named, and left"
    assert run(RAW, "--fix-risks") == 0
    out, err = capsys.readouterr()
    assert out == (
        f"{RAW} --logprobs-mode processed_logprobs --generation-config vllm --no-enable-prefix-caching\n"
    )
    assert run(out.strip(), "--fix-risks") == 0
    again, err = capsys.readouterr()
    assert again == out
    assert err == "nothing to change\n"


def test_what_no_flag_can_change_is_not_passed_over(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    sound = "--logprobs-mode processed_logprobs --no-enable-prefix-caching --no-async-scheduling"
    assert run(f"vllm serve {tmp_path} {sound}", "--fix") == 1
    first, left, *_ = capsys.readouterr().err.splitlines()
    assert first == "nothing that can be changed here"
    assert left.startswith("still wrong: quantisation awq: ")


@pytest.mark.parametrize("options", [("--fix", "--json"), ("--fix-risks", "--json")])
def test_options_that_say_two_things_are_refused(options):
    assert run(RAW, *options) == 2
    assert run("http://127.0.0.1:9", "--vllm-version", "0.9") == 2


def test_notes_are_folded_away(capsys):
    run(RAW)
    short = capsys.readouterr().out.splitlines()
    run(RAW, "--all")
    long = capsys.readouterr().out.splitlines()
    assert short[0] == long[0], "they are counted all the same"
    assert not any(line.startswith("note ") for line in short)
    assert sum(line.startswith("note ") for line in long) == int(short[-1].split()[0])


@pytest.mark.parametrize(
    ("version", "code"), [("0.32", 1), ("0.32.1", 1), ("0.28.0", 1), ("0.18.1", 1), ("v0.9.2", 3), ("new", 2)]
)
def test_another_version_has_other_defaults(version, code):
    assert run(RAW, "--vllm-version", version) == code
    assert run(f"{RAW} --logprobs-mode raw_logits", "--vllm-version", version) == (code if code == 2 else 1)


@pytest.mark.parametrize(("version", "code"), [("0.8.5", 1), ("0.18.1", 0), ("0.28", 0), ("0.9", 0)])
def test_a_flag_that_a_version_does_not_have_is_wrong(
    version: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--generation-config vllm --max-num-batched-tokens 512"
    assert (
        run(f"{RAW} --logprobs-mode processed_logprobs {flags}", "--vllm-version", version, "--json") == code
    )
    found = json.loads(capsys.readouterr().out)["findings"]
    assert ("refused" in {finding["rule"] for finding in found}) is (code == 1)
    # What nobody wrote is in nobody's way.
    assert run(f"vllm serve Q {flags}", "--vllm-version", version) == {"0.8.5": 3, "0.9": 3}.get(version, 1)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("docker run vllm/vllm-openai --model x", "'docker'"),
        ("$ vllm serve Q", "'$'"),
        ("vllm serve Q | tee log", "'| tee'"),
        ("vllm serve 'Q", "character 12"),
        ("cd x && vllm serve Q", "&& vllm"),
        ("vllm serve Q\nvllm serve R", "another line"),
        ("trl vllm-serve x", "--model MODEL"),
        ("trl grpo --model x", "trl grpo"),
        ("python -m my.trainer a.b=1", "-m my.trainer"),
        ("vllm Q --x", "`serve`"),
    ],
)
def test_a_refusal_names_the_piece(command, named, capsys):
    assert run(command) == 2
    assert named in capsys.readouterr().err


def test_what_ends_in_an_ampersand_is_read_and_kept(capsys):
    assert run(f"{RAW} &", "--fix") == 0
    assert capsys.readouterr().out == f"{RAW} --logprobs-mode processed_logprobs &\n"


def test_files_of_other_trainers_are_read_by_their_name(tmp_path, capsys):
    (tmp_path / "ppo.yaml").write_text("actor_rollout_ref: {rollout: {temperature: 1}}\n")
    assert run(str(tmp_path / "ppo.yaml")) in (0, 1, 3)
    assert "verl" in capsys.readouterr().out
    assert run(str(tmp_path)) == 2


def test_a_correction_says_that_what_it_hides_must_be_put_back(capsys):
    run("DB_PASS=hunter2 vllm serve M", "--fix")
    out, hiding = capsys.readouterr()
    assert out.startswith("DB_PASS='(not shown)' vllm serve M --logprobs-mode ")
    assert "hunter2" not in out + hiding
    run("vllm serve M", "--fix")
    # One line more than what was changed.
    assert len(hiding.splitlines()) == len(capsys.readouterr().err.splitlines()) + 1


def test_what_cannot_be_fixed_here_stays_wrong(capsys):
    assert run(f"{RAW} --logprobs-mode processed_logprobs", "--temperature", "0", "--fix") == 1
    assert "not set here: temperature 1.0" in capsys.readouterr().err


def test_fix_of_a_file(tmp_path, capsys):
    file = tmp_path / "grpo.yaml"
    file.write_text(f"use_vllm: true # fast\ntop_p: 0.9\nhub_token: {SECRET}\n")
    assert run(str(file), "--fix") == 0
    out = capsys.readouterr().out
    assert out == "use_vllm: true # fast\ntop_p: 1.0\nhub_token: (not shown)\n"
    assert run(str(file), "--kind", "vllm") == 1  # where none of these is a flag


@pytest.mark.parametrize("options", [(), ("--fix",), ("--json",), ("--all",)])
def test_secrets_are_never_printed(options, capsys):
    run(
        f"MY_SECRET={SECRET} HF_TOKEN={SECRET} {RAW} --api-key {SECRET} --our-token {SECRET} extra {SECRET}",
        *options,
    )
    out, err = capsys.readouterr()
    assert SECRET not in out + err


def test_a_key_is_taken_from_a_variable(monkeypatch, capsys):
    monkeypatch.delenv("NO_SUCH", raising=False)
    assert run("http://127.0.0.1:9", "--api-key-env", "NO_SUCH") == 2
    assert "export it first" in capsys.readouterr().err
    monkeypatch.setenv("OUR_KEY", SECRET)
    assert run("http://127.0.0.1:9", "--api-key-env", "OUR_KEY") == 3
    assert SECRET not in capsys.readouterr().err

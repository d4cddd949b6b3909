"""What a model's own files say is in force where no flag says otherwise: as vLLM 0.32 reads them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import fixes
from zerodrift.doctor.open_target import open_text
from zerodrift.doctor.setting import FileKind, Origin, Setting

SOUND = "--dtype bfloat16 --logprobs-mode processed_logprobs --generation-config vllm"
SOUND += " --no-enable-prefix-caching --no-async-scheduling"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4}}


def directory(root: Path, contents: Mapping[str, object], name: str = "model") -> Path:
    """A model's directory with these files, `.json` left out; text is written as it is."""
    place = root / name
    place.mkdir()
    for file, content in contents.items():
        (place / f"{file}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return place


def setting(command: str, name: str) -> Setting:
    return CommandLine(command).read().settings[name]


def found(command: str, name: str) -> object:
    read = setting(command, name)
    return read.value if read.known else "?"


def fired(command: str) -> set[str]:
    return {finding.rule for finding in diagnose(CommandLine(command), {})[0].findings}


def exit_code(command: str) -> int:
    return diagnose(CommandLine(command), {})[0].exit_code


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"config": AWQ}, "awq"),
        ({"config": {"compression_config": {"quant_method": "compressed_tensors"}}}, "compressed-tensors"),
        ({"config": {"text_config": AWQ}}, "awq"),
        ({"config": {"text_config": {"compression_config": {"quant_method": "mxfp4"}}}}, "mxfp4"),
        ({"config": {}, "hf_quant_config": {}}, "modelopt"),
        ({"config": {"quantization_config": None}}, None),
        ({"config": {"quantization_config": {"quant_method": ""}}}, None),
        ({}, "?"),
        ({"config": "{"}, "?"),
        ({"config": {"quantization_config": "awq"}}, "?"),
        ({"config": DEEP}, "?"),
    ],
)
def test_the_method_is_the_checkpoints(tmp_path, contents, expected):
    command = f"vllm serve {directory(tmp_path, contents)} {SOUND}"
    assert found(command, "quantization") == expected
    assert ("quantisation-unseen" in fired(command)) is (expected == "?")
    assert ("quantised-weights" in fired(command)) is (expected not in ("?", None))


def test_no_flag_cures_a_quantised_checkpoint(tmp_path):
    target = CommandLine(f"vllm serve {directory(tmp_path, {'config': AWQ})} {SOUND}")
    diagnosis, judgements = diagnose(target, {})
    (advice,) = (finding for finding in diagnosis.findings if finding.rule == "quantised-weights")
    assert (advice.value, advice.type, diagnosis.exit_code) == ("awq", (), 1)
    assert "quantization" not in fixes(judgements)


@pytest.mark.parametrize(
    ("model", "flags", "code", "noted"),
    [
        ("Qwen/Qwen3-8B", "", 0, True),
        ("Qwen/Qwen3-8B", "--quantization fp8", 1, False),
        ("Qwen/Qwen3-8B", "--quantization $METHOD", 3, False),
        ("Qwen/Qwen3-8B", "--hf-overrides.quantization_config.quant_method fp8", 3, False),
        # Called quantised, or a directory that is not here: not seeing it decides.
        ("Qwen/Qwen3-8B-FP8", "", 3, False),
        ("org/Llama-3.1-8B-w4a16-instruct", "", 3, False),
        ("/no/such/model", "", 3, False),
    ],
)
def test_a_checkpoint_that_cannot_be_looked_into(model, flags, code, noted):
    command = f"vllm serve {model} {SOUND} {flags}"
    assert exit_code(command) == code
    assert ("quantisation-unseen" in fired(command)) is noted


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("{0}/plain --hf-config-path {0}/awq", "awq"),
        ("{0}/awq --hf-config-path {0}/plain", None),
        ("{0}/awq --hf-config-path $ELSEWHERE", "?"),
        ("{0}/awq --quantization None", "awq"),
        ("{0}/awq --quantization awq_marlin", "awq_marlin"),
        # What an override makes of it is not followed.
        ("{0}/awq --hf-overrides '{{\"quantization_config\": null}}'", "?"),
        ("{0}/plain --hf-overrides.quantization_config.quant_method fp8", "?"),
        ("{0}/eyes --hf-overrides.text_config.rope_theta 1000000", "?"),
        ("{0}/eyes --hf-overrides.rope_theta 1000000", "awq"),
        ("{0}/plain --hf-overrides $OVERRIDES", "?"),
    ],
)
def test_the_configuration_in_force_is_read(tmp_path, words, expected):
    directory(tmp_path, {"config": {}}, "plain")
    directory(tmp_path, {"config": AWQ}, "awq")
    directory(tmp_path, {"config": {"text_config": AWQ}}, "eyes")
    assert found(f"vllm serve {words.format(tmp_path)}", "quantization") == expected


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("model: {0}\n", FileKind.VLLM, ("awq", Origin.CHECKPOINT)),
        ("model: {0}\nhf-config-path: null\n", FileKind.VLLM, ("awq", Origin.CHECKPOINT)),
        ("engine: {{name: vllm}}\nmodel: {{path: {0}}}\n", FileKind.ZERODRIFT, ("awq", Origin.CHECKPOINT)),
        # A built-in model is written by us.
        (
            "engine: {{name: vllm}}\nmodel: {{path: testbed:qwen3}}\n",
            FileKind.ZERODRIFT,
            (None, Origin.FRAMEWORK),
        ),
        ("engine: {{name: vllm}}\n", FileKind.ZERODRIFT, (None, Origin.FRAMEWORK)),
        ("engine: {{name: vllm, args: [-q, fp8]}}\n", FileKind.ZERODRIFT, ("fp8", Origin.SET)),
        ("engine: {{name: vllm}}\nmodel: {{path: Q}}\n", FileKind.ZERODRIFT, (None, Origin.UNKNOWN)),
    ],
)
def test_files_name_checkpoints_too(tmp_path, text, kind, expected):
    target = open_text(text.format(directory(tmp_path, {"config": AWQ})), "f.yaml", kind)
    read = target.read().settings["quantization"]
    assert (read.value, read.origin) == expected


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"generation_config": '{"presence_penalty": 1.5}'}, "presence_penalty 1.5"),
        (
            {"generation_config": '{"repetition_penalty": 1.1, "min_p": 0.05}'},
            "min_p 0.05, repetition_penalty 1.1",
        ),
        ({"generation_config": '{"top_k": -1, "temperature": 1, "presence_penalty": 0}'}, None),
        ({"generation_config": '{"top_p": null, "max_new_tokens": 4096, "typical_p": 0.5}'}, None),
        ({"generation_config": "{"}, "?"),
        ({"generation_config": DEEP}, "?"),
        ({"config": '{"temperature": 0.6}'}, None),
        ({}, None),
    ],
)
def test_what_a_server_fills_in(tmp_path, contents, expected):
    assert found(f"vllm serve {directory(tmp_path, contents)}", "generation_defaults") == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("{0}/plain --generation-config {0}/warm", "temperature 0.6"),
        ("{0}/warm --generation-config {0}/plain", None),
        ("{0}/plain --hf-config-path {0}/warm", "temperature 0.6"),
        ("{0}/plain --generation-config {0}/nowhere", "?"),
        ("{0}/plain --generation-config $GC", "?"),
        ("Q --generation-config auto", "?"),
        # vLLM takes the override first and drops nulls only then.
        ("{0}/warm --override-generation-config '{{\"temperature\": null}}'", None),
        ("{0}/warm --override-generation-config.temperature 1.0", None),
        ("{0}/warm --override-generation-config '{{\"top_p\": 1.0}}'", "temperature 0.6"),
    ],
)
def test_which_defaults_are_in_force(tmp_path, words, expected):
    directory(tmp_path, {"generation_config": {"temperature": 0.6}}, "warm")
    directory(tmp_path, {"generation_config": {"top_p": 1.0}}, "plain")
    assert found(f"vllm serve {words.format(tmp_path)}", "generation_defaults") == expected


@pytest.mark.parametrize(("model", "said"), [("./nowhere", True), ("Qwen/Qwen3-8B", False), (".", False)])
def test_a_directory_that_is_not_here_is_said_to_be_missing(model: str, said: bool) -> None:
    reading = CommandLine(f"vllm serve {model} --logprobs-mode processed_logprobs").read()
    assert any(line.startswith(f"{model}: ") for line in reading.not_judged) is said

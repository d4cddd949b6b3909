"""What a checkpoint says of itself is in force where no flag says otherwise: as vLLM 0.32 reads its config.json."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import cures
from zerodrift.doctor.kinds import FileKind
from zerodrift.doctor.open_target import open_text
from zerodrift.doctor.setting import Origin, Setting

SOUND = "--dtype bfloat16 --logprobs-mode processed_logprobs --generation-config vllm"
SOUND += " --no-enable-prefix-caching --no-async-scheduling"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4}}


def directory(root: Path, contents: Mapping[str, object], name: str = "model") -> Path:
    """A model's directory with these files, `.json` left out; text is written as it is."""
    place = root / name
    place.mkdir()
    for file, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (place / f"{file}.json").write_text(text)
    return place


def quantization(command: str) -> Setting:
    return CommandLine(command).read().settings["quantization"]


def fired(command: str) -> set[str]:
    return {finding.rule for finding in diagnose(CommandLine(command), {})[0].findings}


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"config": AWQ}, "awq"),
        ({"config": {"quantization_config": {"quant_method": "FP8"}}}, "fp8"),
        (
            {"config": {"compression_config": {"quant_method": "compressed_tensors"}}},
            "compressed-tensors",
        ),
        ({"config": {"text_config": AWQ}}, "awq"),
        ({"config": {"text_config": {"compression_config": {"quant_method": "mxfp4"}}}}, "mxfp4"),
        (
            {
                "config": {},
                "hf_quant_config": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            },
            "modelopt",
        ),
        (
            {
                "config": {},
                "hf_quant_config": {
                    "producer": {"name": "modelopt"},
                    "quantization": {"quant_algo": "NVFP4"},
                },
            },
            "modelopt_fp4",
        ),
        ({"config": {"model_type": "qwen3"}}, None),
        ({"config": {"quantization_config": None}}, None),
        ({"config": {"quantization_config": {"quant_method": ""}}}, None),
    ],
)
def test_the_method_is_the_checkpoints(
    tmp_path: Path, contents: dict[str, object], expected: str | None
) -> None:
    setting = quantization(f"vllm serve {directory(tmp_path, contents)}")
    assert (setting.value, setting.origin) == (expected, Origin.CHECKPOINT)


@pytest.mark.parametrize(
    "contents",
    [
        {},
        {"config": "{"},
        {"config": []},
        {"config": {"quantization_config": "awq"}},
        {"config": {}, "hf_quant_config": "{"},
        {"config": DEEP},
        {"config": {}, "hf_quant_config": DEEP},
    ],
)
def test_what_cannot_be_read_is_unknown(tmp_path: Path, contents: dict[str, object]) -> None:
    command = f"vllm serve {directory(tmp_path, contents)} {SOUND}"
    assert not quantization(command).known
    assert "quantisation-unseen" in fired(command)


def test_a_quantised_checkpoint_is_judged_and_no_flag_cures_it(tmp_path: Path) -> None:
    command = f"vllm serve {directory(tmp_path, {'config': AWQ})} {SOUND}"
    diagnosis, judgements = diagnose(CommandLine(command), {})
    (advice,) = (finding for finding in diagnosis.findings if finding.rule == "quantised-weights")
    assert (advice.value, advice.type) == ("awq", ())
    assert "checkpoint" in advice.do
    assert diagnosis.exit_code == 1
    assert "quantization" not in cures(judgements)
    assert CommandLine(command).changed(cures(judgements)) == command


def test_a_checkpoint_that_is_not_quantised_is_fine(tmp_path: Path) -> None:
    command = f"vllm serve {directory(tmp_path, {'config': {}})} {SOUND}"
    assert fired(command).isdisjoint({"quantised-weights", "quantisation-unseen"})


def test_a_name_on_the_hub_cannot_be_looked_into() -> None:
    """A note, as every name on the hub would get it; no answer of its own."""
    command = f"vllm serve Q {SOUND}"
    assert not quantization(command).known
    assert "quantisation-unseen" in fired(command)
    assert diagnose(CommandLine(command), {})[0].exit_code == 0
    assert "quantisation-unseen" not in fired(f"{command} --quantization fp8")


def test_a_flag_of_the_shell_stays_undecided(tmp_path: Path) -> None:
    """What the shell hides is not what the checkpoint hides."""
    for model in ("Q", directory(tmp_path, {"config": {}})):
        command = f"vllm serve {model} {SOUND} --quantization $METHOD"
        assert not quantization(command).known
        assert "quantisation-unseen" not in fired(command)
        assert diagnose(CommandLine(command), {})[0].exit_code == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("{0}/plain --hf-config-path {0}/awq", "awq"),
        ("{0}/awq --hf-config-path {0}/plain", None),
        ("Q --hf-config-path {0}/awq", "awq"),
        ("{0}/awq --hf-config-path $ELSEWHERE", "?"),
        ("{0}/awq --hf-config-path Q", "?"),
        ("{0}/plain --quantization None", None),
        ("{0}/awq --quantization None", "awq"),
        ("{0}/awq --quantization awq_marlin", "awq_marlin"),
        ("{0}/awq --hf-overrides '{{\"quantization_config\": null}}'", None),
        ('{0}/plain --hf-overrides \'{{"quantization_config": {{"quant_method": "fp8"}}}}\'', "fp8"),
        ("{0}/plain --hf-overrides.quantization_config.quant_method fp8", "fp8"),
        ("{0}/awq --hf-overrides.quantization_config.bits 8", "?"),
        ('{0}/awq --hf-overrides \'{{"quantization_config": {{"bits": 8}}}}\'', "?"),
        ("{0}/eyes --hf-overrides.text_config.rope_theta 1000000", "awq"),
        ('{0}/eyes --hf-overrides \'{{"text_config": {{"rope_theta": 1000000}}}}\'', "awq"),
        ("{0}/eyes --hf-overrides.text_config.quantization_config.bits 8", "awq"),
        ("{0}/eyes --hf-overrides.text_config.a 1 --hf-overrides.text_config.b 2", "awq"),
        ("{0}/eyes --hf-overrides.text_config.quantization_config null", None),
        ("{0}/eyes --hf-overrides '{{\"text_config\": null}}'", "?"),
        ("{0}/plain --hf-overrides.text_config.rope_theta 1000000", None),
        (
            "{0}/plain --hf-overrides.text_config.quantization_config.quant_method fp8 --hf-overrides.text_config.a 1",
            "fp8",
        ),
        ("{0}/plain --hf-overrides $OVERRIDES", "?"),
    ],
)
def test_the_configuration_in_force_is_read(tmp_path: Path, words: str, expected: str | None) -> None:
    directory(tmp_path, {"config": {}}, "plain")
    directory(tmp_path, {"config": AWQ}, "awq")
    directory(tmp_path, {"config": {"text_config": AWQ}}, "eyes")
    setting = quantization(f"vllm serve {words.format(tmp_path)}")
    assert (setting.value if setting.known else "?") == expected


@pytest.mark.parametrize(("path", "expected"), [("null", "awq"), ("''", "awq"), ("plain", None)])
def test_a_path_that_is_null_is_none(tmp_path: Path, path: str, expected: str | None) -> None:
    model, plain = directory(tmp_path, {"config": AWQ}), directory(tmp_path, {"config": {}}, "plain")
    text = f"model: {model}\nhf-config-path: {plain if path == 'plain' else path}\n"
    setting = open_text(text, "serve.yaml", FileKind.VLLM).read().settings["quantization"]
    assert (setting.value, setting.origin) == (expected, Origin.CHECKPOINT)


@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_sampling_defaults_nested_too_deeply_are_unknown(tmp_path: Path, name: str) -> None:
    settings = CommandLine(f"vllm serve {directory(tmp_path, {name: DEEP})}").read().settings
    assert not settings["generation_defaults"].known


def test_files_name_checkpoints_too(tmp_path: Path) -> None:
    model = directory(tmp_path, {"config": AWQ})
    serve = f"model: {model}\ndtype: bfloat16\n"
    assert open_text(serve, "serve.yaml", FileKind.VLLM).read().settings["quantization"].value == "awq"
    (tmp_path / "serve.yaml").write_text(serve)
    assert quantization(f"vllm serve --config {tmp_path}/serve.yaml").origin is Origin.CHECKPOINT
    ours = f"engine: {{name: vllm}}\nmodel: {{path: {model}}}\n"
    assert open_text(ours, "run.yaml", FileKind.ZERODRIFT).read().settings["quantization"].value == "awq"


@pytest.mark.parametrize(
    ("model", "args", "expected"),
    [
        ("testbed:qwen3", "[]", None),
        ("null", "[]", None),  # the built-in one, too
        ("testbed:qwen3", "[--quantization, fp8]", "fp8"),
    ],
)
def test_a_built_in_model_is_known_to_be_whole(model: str, args: str, expected: str | None) -> None:
    text = f"model: {{path: {model}}}\nengine: {{name: vllm, args: {args}}}\n"
    target = open_text(text, "run.yaml", FileKind.ZERODRIFT)
    assert target.read().settings["quantization"].value == expected
    assert "quantisation-unseen" not in {finding.rule for finding in diagnose(target, {})[0].findings}


def test_another_name_is_not() -> None:
    text = "model: {path: Qwen/Qwen3-8B}\nengine: {name: vllm}\n"
    findings = diagnose(open_text(text, "run.yaml", FileKind.ZERODRIFT), {})[0].findings
    assert "quantisation-unseen" in {finding.rule for finding in findings}

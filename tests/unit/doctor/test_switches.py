"""Variables that switch something on: most are read as integers by vLLM 0.32, two as words."""

import pytest

from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.open_target import open_text
from zerodrift.doctor.setting import Value

INTEGERS = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "insecure_serialization",
    "VLLM_SERVER_DEV_MODE": "dev_mode",
    "VLLM_BATCH_INVARIANT": "batch_invariant",
    "VLLM_USE_FLASHINFER_SAMPLER": "flashinfer_sampler",
    "VLLM_CPU_ATTN_SPLIT_KV": "cpu_attn_split_kv",
}
WORDS = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "runtime_lora",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "long_max_model_len",
}


def command(variable: str, text: str) -> CommandLine:
    return CommandLine(f"{variable}='{text}' vllm serve m")


@pytest.mark.parametrize("variable", INTEGERS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", True), ("2", True), ("01", True), ("-1", True), (" 1 ", True), ("0", False), ("00", False)],
)
def test_an_integer_other_than_nought_is_on(variable: str, text: str, expected: Value) -> None:
    settings = command(variable, text).read().settings
    assert settings[INTEGERS[variable]].value is expected
    assert settings["refused"].value is None


@pytest.mark.parametrize("variable", INTEGERS)
@pytest.mark.parametrize("text", ["true", "True", "false", "on", "", "1.0"])
def test_a_word_in_place_of_an_integer_stops_vllm(variable: str, text: str) -> None:
    target = command(variable, text)
    settings = target.read().settings
    assert not settings[INTEGERS[variable]].known
    assert f"{variable}={text} is no number" in str(settings["refused"].value)
    diagnosis, _ = diagnose(target, {})
    assert diagnosis.exit_code == 1
    assert "refused" in {finding.rule for finding in diagnosis.findings}


@pytest.mark.parametrize("variable", WORDS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", True), ("TRUE", True), (" true ", True), ("2", False), ("01", False), ("yes", False), ("", False)],
)
def test_two_are_read_as_words(variable: str, text: str, expected: Value) -> None:
    settings = command(variable, text).read().settings
    assert settings[WORDS[variable]].value is expected
    assert settings["refused"].value is None


def test_what_the_shell_fills_in_is_not_refused() -> None:
    settings = CommandLine('VLLM_SERVER_DEV_MODE="$MODE" vllm serve m').read().settings
    assert not settings["dev_mode"].known
    assert settings["refused"].value is None


@pytest.mark.parametrize(("text", "refused"), [("true", True), ("1", False)])
def test_variables_of_our_own_file(text: str, refused: bool) -> None:
    content = f"engine: {{name: vllm, env: {{VLLM_SERVER_DEV_MODE: '{text}'}}}}\n"
    settings = open_text(content, "file.yaml", None).read().settings
    assert settings["dev_mode"].known is not refused
    assert ("is no number" in str(settings["refused"].value)) is refused

"""What a server fills into requests that leave sampling out: as vLLM puts it together, file by file."""

from pathlib import Path

import pytest

from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import cures
from zerodrift.doctor.setting import Setting


def defaults(command: str) -> Setting:
    return CommandLine(command).read().settings["generation_defaults"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"presence_penalty": 1.5}', "presence_penalty 1.5"),
        ('{"frequency_penalty": 0.5}', "frequency_penalty 0.5"),
        ('{"repetition_penalty": 1.1, "min_p": 0.05}', "min_p 0.05, repetition_penalty 1.1"),
        ('{"top_k": -1, "temperature": 1, "presence_penalty": 0}', None),
        ('{"top_p": null, "max_new_tokens": 4096, "typical_p": 0.5}', None),
    ],
)
def test_every_key_that_vllm_takes_is_looked_at(tmp_path: Path, content: str, expected: str | None) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    setting = defaults(f"vllm serve {tmp_path}")
    assert (setting.known, setting.value) == (True, expected)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A model that changes the distribution, and directories that do not, or cannot be read."""
    contents = {"warm": '{"temperature": 0.6}', "plain": '{"top_p": 1.0}', "broken": "{", "list": "[]"}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "generation_config.json").write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "known", "expected"),
    [
        ("{0}/plain --generation-config {0}/warm", True, "temperature 0.6"),
        ("{0}/warm --generation-config {0}/plain", True, None),
        ("{0}/warm --generation-config auto", True, "temperature 0.6"),
        ("{0}/warm --generation-config vllm", True, None),
        ("Q --generation-config vllm", True, None),
        ("Q --generation-config {0}/warm", True, "temperature 0.6"),
        ("{0}/plain --hf-config-path {0}/warm", True, "temperature 0.6"),
        ("{0}/plain --generation-config {0}/broken", False, None),
        ("{0}/plain --generation-config {0}/list", False, None),
        ("{0}/plain --generation-config {0}/nowhere", False, None),
        ("{0}/plain --generation-config $GC", False, None),
        ("Q --generation-config auto", False, None),
    ],
)
def test_the_directory_in_force_is_read(two: Path, words: str, known: bool, expected: str | None) -> None:
    setting = defaults(f"vllm serve {words.format(two)}")
    assert (setting.known, setting.value) == (known, expected)


def test_a_directory_of_ones_own_is_judged_by_what_it_holds(two: Path) -> None:
    sound = "vllm serve Q --logprobs-mode processed_logprobs --generation-config"
    assert diagnose(CommandLine(f"{sound} {two}/plain"), {})[0].exit_code == 0
    found, judgements = diagnose(CommandLine(f"{sound} {two}/warm"), {})
    assert "generation-config-applied" in {finding.rule for finding in found.findings}
    assert cures(judgements)["generation_config"] == "vllm"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"max_new_tokens": 4096}', None),
        ('{"temperature": 1.0, "top_p": 1.0}', None),
        ('{"top_k": -1, "presence_penalty": null}', None),
        ('{"top_p": 0.9, "temperature": 1.0, "max_new_tokens": 4096}', "top_p"),
        ('{"frequency_penalty": 0.5, "temperature": 0.6}', "temperature, frequency_penalty"),
    ],
)
def test_only_overrides_that_change_the_distribution_are_wrong(written: str, expected: str | None) -> None:
    command = f"vllm serve Q --logprobs-mode processed_logprobs --override-generation-config '{written}'"
    assert CommandLine(command).read().settings["override_generation_config"].value == expected
    assert diagnose(CommandLine(command), {})[0].exit_code == (0 if expected is None else 1)


@pytest.mark.parametrize(
    ("words", "known", "expected"),
    [
        ("{0}/warm --override-generation-config '{{\"temperature\": 1.0}}'", True, None),
        ("{0}/warm --override-generation-config.temperature 1.0", True, None),
        # vLLM takes the override first and drops nulls only then.
        ("{0}/warm --override-generation-config '{{\"temperature\": null}}'", True, None),
        ("{0}/warm --override-generation-config '{{\"top_p\": 1.0}}'", True, "temperature 0.6"),
        ("Q --override-generation-config '{{\"temperature\": 1.0}}'", False, None),
    ],
)
def test_an_override_wins_over_the_file(two: Path, words: str, known: bool, expected: str | None) -> None:
    setting = defaults(f"vllm serve {words.format(two)}")
    assert (setting.known, setting.value) == (known, expected)


@pytest.mark.parametrize(
    ("config", "known", "expected"),
    [
        # As vLLM 0.32 answers with transformers 5.19, which drops what has a default in its generation config.
        ('{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}', True, None),
        ('{"presence_penalty": 0.5, "frequency_penalty": 0.5}', True, None),
        ('{"min_p": 0.1}', True, "min_p 0.1"),
        ('{"min_p": null}', True, None),
        ('{"text_config": {"min_p": 0.1}}', True, "min_p 0.1"),
        ('{"text_config": {"min_p": 0.1}, "min_p": 0.2}', True, "min_p 0.2"),
        ("{", False, None),
    ],
)
def test_without_a_file_of_its_own_a_config_may_hold_defaults(
    tmp_path: Path, config: str, known: bool, expected: str | None
) -> None:
    (tmp_path / "config.json").write_text(config)
    setting = defaults(f"vllm serve {tmp_path}")
    assert (setting.known, setting.value) == (known, expected)
    (tmp_path / "generation_config.json").write_text("{}")
    assert defaults(f"vllm serve {tmp_path}").value is None

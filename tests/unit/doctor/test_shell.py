"""Commands as shells see them: comments, line breaks and variables, and what a shell makes of a corrected one."""

import shlex
import subprocess

import pytest

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import Diagnosis, diagnose
from zerodrift.doctor.judge import cures
from zerodrift.doctor.shell_words import commands, split

ADDED = [
    "--logprobs-mode",
    "processed_logprobs",
    "--generation-config",
    "vllm",
    "--no-enable-prefix-caching",
    "--no-async-scheduling",
]


def judged(command: str) -> Diagnosis:
    return diagnose(CommandLine(command), {})[0]


def corrected(command: str) -> str:
    target = CommandLine(command)
    return target.changed(cures(diagnose(target, {})[1]))


def run(script: str) -> list[str]:
    """The words that a program called vllm is started with."""
    stub = "vllm() { printf '%s\\n' \"$@\"; }\n"
    shell = subprocess.run(
        ["bash", "-c", stub + script], capture_output=True, text=True, check=True, timeout=60
    )
    assert shell.stderr == ""
    return shell.stdout.splitlines()


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m # prod",
        "vllm serve m# # prod # twice",
        "# the server\nvllm serve m",
        "vllm serve m \\",
        "vllm serve m \\\n",
        "vllm serve m \\\n  --seed 1 \\\n",
        "vllm serve m \\\n  --seed 1  # why not",
        "export A=1\nvllm serve m",
        "vllm serve 'm # x' --seed 1",
    ],
)
def test_a_shell_hands_over_what_was_corrected(command: str) -> None:
    fixed = corrected(command)
    assert run(fixed)[-len(ADDED) :] == ADDED
    assert run(fixed)[0] == "serve"
    assert judged(fixed).exit_code == 0
    assert corrected(fixed) == fixed
    last = commands(fixed)[-1]
    assert run(fixed) == [word.text for word in last][1:]


def test_a_line_break_ends_the_command() -> None:
    with pytest.raises(ConfigError, match="end each line of the command with a backslash"):
        CommandLine("vllm serve m\n  --logprobs-mode processed_logprobs")
    assert [word.text for word in split("vllm serve m\n--seed 1")] == ["vllm", "serve", "m"]


@pytest.mark.parametrize("words", ["$EXTRA_ARGS", '"$@"', "${ARGS:-}", '--seed 1 "${MORE[@]}"'])
def test_words_of_a_variable_cannot_be_seen(words: str) -> None:
    sound = f"vllm serve m --no-async-scheduling --logprobs-mode processed_logprobs {words}"
    diagnosis = judged(sound)
    assert diagnosis.exit_code == 3
    assert any("not expanded here" in text for text in diagnosis.not_judged)
    assert "unseen_words" in {row.setting for row in diagnosis.settings}
    assert judged(corrected(sound)).exit_code == 3


def test_the_last_word_is_the_shells_only_where_it_says_so() -> None:
    assert judged("vllm serve m '$EXTRA'").exit_code == 1  # a word like any other, and one too many
    assert "unseen_words" not in CommandLine('vllm serve "$MODEL" --seed 1').read().settings


def test_json_from_a_variable_is_not_expanded() -> None:
    reading = CommandLine('vllm serve m --hf-overrides "$OV" --dtype $DTYPE --seed 1').read()
    assert "--hf-overrides $OV: a variable of the shell, which is not expanded here" in reading.not_judged
    assert not reading.settings["head_dtype"].known
    assert not reading.settings["hf_overrides"].known
    assert not reading.settings["dtype"].known
    assert reading.settings["seed"].value == 1


def test_a_key_from_a_variable_is_a_key() -> None:
    assert CommandLine('vllm serve m --api-key "$KEY"').read().settings["api_key"].value is True


def test_words_are_those_of_python_too() -> None:
    text = "a 'b c' \"d e\" f\\ g"
    assert [word.text for word in split(text)] == shlex.split(text)

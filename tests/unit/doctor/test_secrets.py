"""Nothing of a secret is printed, however it is spelled: not in a diagnosis, not in a correction, not in an error."""

from itertools import product

import msgspec
import pytest

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import cures
from zerodrift.doctor.kinds import FileKind
from zerodrift.doctor.open_target import open_text
from zerodrift.doctor.target import Target

ONE, TWO = "hunter2", "swordfish"
KEYS = [
    ONE,
    f"{ONE} {TWO}",
    f"'{ONE} {TWO}'",
    f'"{ONE} {TWO}"',
    f"{ONE}\\ {TWO}",
    f"-{ONE}",
    f"'{ONE}' -{TWO}",
    f"{ONE} ${{KEY:-{TWO}}}",
    f'"${{KEY:-{ONE}}}"',
    f"${{KEY-{ONE}}}",
    f"'${ONE}'",
]
SPELLINGS = [
    "vllm serve Q --api-key {}",
    "vllm serve Q --api-key={}",
    "vllm serve Q --api_key={} --seed 1",
    "vllm serve Q --seed 1 --api {}",
    "vllm serve --model Q --api-key={} --seed 1",
    "vllm serve Q --hf-token {}",
    "vllm serve Q --hf-token={} --dtype bfloat16",
    "vllm serve Q --my-secret {}",
    "vllm serve Q --my-secret={} -tp 2",
    "vllm serve Q --api-key {} --hf-token={}",
    "export HF_TOKEN={}\nvllm serve Q",
    "HF_TOKEN={}\nvllm serve Q",
    "python -m pipelinerl.entrypoints.run_vllm1 --model Q --api-key={}",
]
QUOTED = [ONE, f"'{ONE} {TWO}'", f'"{ONE} {TWO}"', f"{ONE}\\ {TWO}", f'"${{KEY:-{ONE}}}"']
BEFORE = [
    "HF_TOKEN={} vllm serve Q",
    "env VLLM_API_KEY={} vllm serve Q",
    "docker run -e HF_TOKEN={} i vllm serve Q",
    "docker run --env=HF_TOKEN={} i vllm serve Q",
]
FILES = [
    "api-key: {}",
    "api_key: {}",
    "api-key: [{}, {}]",
    "api-key:\n  - {}\n  - {}",
    "hf-token: {}",
    "hf-token: [{}]",
    "watermark-config:\n  a: {}",
    "watermark_config: {}",
    "x: &key {}\napi-key: *key\nhf-token: *key",
]


def printed(target: Target) -> str:
    """All that the doctor can say about it."""
    diagnosis, judgements = diagnose(target, {})
    said = msgspec.json.encode(diagnosis).decode()
    return said + target.changed(cures(judgements)) + target.changed({})


def assert_hidden(text: str) -> None:
    assert ONE not in text
    assert TWO not in text


@pytest.mark.parametrize(("spelling", "key"), [*product(SPELLINGS, KEYS), *product(BEFORE, QUOTED)])
def test_no_command_shows_its_secrets(spelling: str, key: str) -> None:
    try:
        text = printed(CommandLine(spelling.replace("{}", key)))
    except ConfigError as error:
        text = str(error)
    assert_hidden(text)


@pytest.mark.parametrize(
    ("lines", "key"), list(product(FILES, [ONE, f'"{ONE} {TWO}"', f"-{ONE}", f"'-{ONE} {TWO}'"]))
)
def test_no_file_shows_its_secrets(lines: str, key: str) -> None:
    content = f"model: Q\n{lines.replace('{}', key)}\nseed: 1\n"
    text = printed(open_text(content, "serve.yaml", FileKind.VLLM))
    assert_hidden(text)
    assert "seed: 1" in text


def test_a_stray_word_is_refused_without_being_named() -> None:
    command = CommandLine(f"vllm serve Q --api-key={ONE} {TWO} --seed 1")
    assert command.read().settings["refused"].value == "a word behind --api-key belongs to no flag"
    assert command.changed({}) == 'vllm serve Q --api-key="$VLLM_API_KEY" "$VLLM_API_KEY_2" --seed 1'


def test_the_model_may_stand_behind_a_key() -> None:
    """The control: the only word that belongs to no flag is the model, and stays one."""
    command = CommandLine(f"vllm serve --api-key={ONE} Q --seed 1")
    assert command.model == "Q"
    assert command.read().settings["refused"].value is None
    fixed = command.changed({})
    assert fixed == 'vllm serve --api-key="$VLLM_API_KEY" Q --seed 1'
    assert CommandLine(fixed).model == "Q"


def test_a_slip_of_the_pen_behind_a_key_is_still_named() -> None:
    refused = CommandLine(f"vllm serve Q --api-key {ONE} --lgprobs-mode x").read().settings["refused"].value
    assert "did you mean --logprobs-mode" in str(refused)
    other = CommandLine("vllm serve Q --seed 1 extra").read().settings["refused"].value
    assert "'extra'" in str(other)


def test_a_variable_without_a_value_in_it_may_stay() -> None:
    for text in ('vllm serve Q --api-key "$KEY"', 'vllm serve Q --api-key="${KEY}"'):
        assert CommandLine(text).changed({}) == text

"""A secret inside a JSON is as secret as one behind a flag; what stands beside it may be shown."""

import json
from pathlib import Path

import pytest

from zerodrift.core.errors import ConfigError
from zerodrift.doctor import json_secrets
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import cures
from zerodrift.doctor.kinds import FileKind
from zerodrift.doctor.open_target import open_text
from zerodrift.doctor.target import Target
from zerodrift.doctor.yaml_text import YamlText

ONE, TWO = "hunter2", "swordfish"
OBJECTS = [
    f'{{"token": "{ONE}"}}',
    f'{{"a": [{{"s3": {{"secret_access_key": "{ONE}"}}}}], "password": ["{TWO}"]}}',
    f'[{{"api_key": {{"id": "{ONE}"}}}}]',
    f'{{"token": "{ONE}", "token": null}}',
    f'{{"inner": "{{\\"token\\": \\"{ONE}\\"}}"}}',
    f'{{"token": "{ONE}", }}',
    f'{{"aws_access_key_id": "{ONE}"}}',
    f'{{"t\\u006fken": "{ONE}"}}',
    '{"a": ' * 5000 + f'{{"token": "{ONE}"}}' + "}" * 5000,
]
FLAG = "--model-loader-extra-config"


def said(target: Target) -> str:
    diagnosis, judgements = diagnose(target, {})
    return repr(diagnosis) + target.changed(cures(judgements)) + target.changed({})


def assert_hidden(text: str) -> None:
    assert ONE not in text
    assert TWO not in text


@pytest.mark.parametrize("written", OBJECTS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("vllm serve Q {flag} '{json}' --seed 1", 'vllm serve Q {flag} "{name}" --seed 1'),
        ("vllm serve Q {flag}='{json}' --seed 1", 'vllm serve Q {flag}="{name}" --seed 1'),
    ],
)
def test_a_json_of_a_command_is_hidden_as_a_whole(written: str, before: str, after: str) -> None:
    target = CommandLine(before.format(flag=FLAG, json=written))
    assert_hidden(said(target))
    assert target.changed({}) == after.format(flag=FLAG, name="$MODEL_LOADER_EXTRA_CONFIG")


@pytest.mark.parametrize("written", OBJECTS)
@pytest.mark.parametrize(
    "before",
    [
        "vllm serve Q --hf-overrides '{json}'",
        "ray job submit --runtime-env-json '{json}' -- vllm serve Q",
        "ray job submit --runtime-env-json='{json}' -- vllm serve Q",
        "CONFIG='{json}' vllm serve Q",
        "docker run --env=CONFIG='{json}' i vllm serve Q",
        "vllm serve Q --lora-modules '{json}' '{json}'",
    ],
)
def test_no_json_of_a_command_shows_its_secrets(before: str, written: str) -> None:
    try:
        text = said(CommandLine(before.format(json=written)))
    except ConfigError as error:
        text = str(error)
    assert_hidden(text)


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (f"{FLAG}.token {ONE}", f'{FLAG}.token "$MODEL_LOADER_EXTRA_CONFIG_TOKEN"'),
        (f"{FLAG}.a.token={ONE}", f'{FLAG}.a.token="$MODEL_LOADER_EXTRA_CONFIG_A_TOKEN"'),
        (f'{FLAG}.a \'{{"token": "{ONE}"}}\'', f'{FLAG}.a "$MODEL_LOADER_EXTRA_CONFIG_A"'),
        (
            f'{FLAG} {{"token": "{ONE}"}}',
            f'{FLAG} "$MODEL_LOADER_EXTRA_CONFIG" "$MODEL_LOADER_EXTRA_CONFIG_2"',
        ),
    ],
)
def test_forms_of_a_flag(words: str, after: str) -> None:
    target = CommandLine(f"vllm serve Q --model Q {words} --seed 1")
    assert_hidden(said(target))
    assert target.changed({}) == f"vllm serve Q --model Q {after} --seed 1"


@pytest.mark.parametrize(
    "words",
    [
        '--hf-overrides \'{"eos_token_id": [1, 2], "tokens": "x"}\'',
        "--hf-overrides.eos_token_id 2",
        f'{FLAG} \'{{"token": null, "key": ""}}\'',
        f"{FLAG} '{{\"concurrency\": 8}}'",
        f'{FLAG} "{{\\"token\\": \\"$TOKEN\\"}}"',
        f"{FLAG}.token $TOKEN",
        "--chat-template '{{ bos_token }}{% for m in x %}'",
    ],
)
def test_what_is_no_secret_stays(words: str) -> None:
    command = f"vllm serve Q {words}"
    assert CommandLine(command).changed({}) == command


def test_a_correction_beside_a_secret_does_not_show_it(tmp_path: Path) -> None:
    written = json.dumps({"backend": "FLASHINFER", "token": ONE})
    target = CommandLine(f"vllm serve Q --attention-config '{written}'")
    fixed = target.changed({"attention_backend": "TRITON_ATTN"})
    assert '"backend": "TRITON_ATTN"' in fixed
    assert_hidden(fixed + str(target.typed("attention_backend", "TRITON_ATTN")))
    file = tmp_path / "serve.yaml"
    file.write_text(f"attention-config: '{written}'\n")
    target = CommandLine(f"vllm serve Q --config {file}")
    assert_hidden(str(target.typed("attention_backend", "TRITON_ATTN")))
    assert_hidden(target.changed({"attention_backend": "TRITON_ATTN"}))


@pytest.mark.parametrize("written", OBJECTS)
@pytest.mark.parametrize(
    "line",
    [
        "model-loader-extra-config: '{}'",
        "model_loader_extra_config: '{}' # comment",
        "model-loader-extra-config: &a '{}'",
        "model-loader-extra-config: |\n  {}",
        "lora-modules: ['{}', '{}']",
    ],
)
def test_no_json_of_a_file_shows_its_secrets(line: str, written: str) -> None:
    content = f"model: Q\n{line.replace('{}', written)}\nseed: 1\n"
    target = open_text(content, "serve.yaml", FileKind.VLLM)
    assert_hidden(said(target))
    changed = YamlText(target.changed({}), "serve.yaml").values
    assert (changed["model"], changed["seed"]) == ("Q", 1)


def test_a_correction_in_a_file_beside_a_secret_is_made() -> None:
    content = f'hf-overrides: \'{{"head_dtype": "model", "token": "{ONE}", "it\'\'s": 1}}\'\n'
    fixed = open_text(content, "serve.yaml", FileKind.VLLM).changed({"head_dtype": "float32"})
    assert json.loads(YamlText(fixed, "f").values["hf-overrides"]) == {
        "head_dtype": "float32",
        "token": "(not shown)",
        "it's": 1,
    }


def test_arguments_of_our_own_file() -> None:
    content = f"engine: {{name: vllm, args: ['{FLAG}={OBJECTS[0]}', --seed, '1']}}\n"
    fixed = open_text(content, "run.yaml", FileKind.ZERODRIFT).changed({})
    assert YamlText(fixed, "f").values["engine"]["args"] == [
        f'{FLAG}={{"token": "(not shown)"}}',
        "--seed",
        "1",
    ]


@pytest.mark.parametrize("line", ["hf-overrides: '{\"eos_token_id\": 2}'", "seed: 1", 'x: \'{"a": "b"}\''])
def test_other_lines_of_a_file_stay(line: str) -> None:
    content = f"model: Q\n{line} # as it was\n"
    assert open_text(content, "serve.yaml", FileKind.VLLM).changed({}) == content


@pytest.mark.parametrize("text", ["", "token", "a=b", "{}", "[]", "token=x"])
def test_what_is_no_json_holds_nothing(text: str) -> None:
    assert json_secrets.inside(text) == []

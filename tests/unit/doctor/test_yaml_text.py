"""Changes in place: one thing is other than before, and the result says what was asked for."""

import pytest

from zerodrift.config.document import parse
from zerodrift.core.errors import ConfigError
from zerodrift.doctor.secrets import HIDDEN, names_a_secret, without_secrets
from zerodrift.doctor.yaml_text import YamlText


@pytest.mark.parametrize(
    ("before", "path", "after"),
    [
        ("a: 1 # one\nb: 2\n", "a", "a: 9 # one\nb: 2\n"),
        ("a: 1", "b", "a: 1\nb: 9\n"),
        ("a:\n  b: 1\n  # last\nc: 2\n", "a.d", "a:\n  b: 1\n  d: 9\n  # last\nc: 2\n"),
        ("a:\nc: 2\n", "a.b", "a:\n  b: 9\nc: 2\n"),
        ("a: null\nc: 2\n", "a.b", "a: {b: 9}\nc: 2\n"),
        ("a: {}\n", "a.b.c", "a: {b: {c: 9}}\n"),
        ("a: {x: 1}\n", "a.b", "a: {x: 1, b: 9}\n"),
        ("c: 2\n", "a.b.d", "c: 2\na:\n  b:\n    d: 9\n"),
        ("a:\n  - x\n  - y\n", "b", "a:\n  - x\n  - y\nb: 9\n"),
        ("a: |\n  text\n  more\nb: 1\n", "c", "a: |\n  text\n  more\nb: 1\nc: 9\n"),
        ("b: 1\na: |\n  text\n", "c", "b: 1\na: |\n  text\nc: 9\n"),
    ],
)
def test_a_value_is_set(before: str, path: str, after: str) -> None:
    changed = YamlText(before, "f").with_value(path.split("."), 9)
    assert changed.text == after
    assert changed.get(path.split(".")) == (True, 9)


@pytest.mark.parametrize(
    ("before", "path", "after"),
    [
        ("a: 1 # one\nb: 2\n", "a", "b: 2\n"),
        ("a:\n  b: 1\n  c: 2\nd: 3\n", "a.b", "a:\n  c: 2\nd: 3\n"),
        ("a:\n  b: 1\nd: 3\n", "a", "d: 3\n"),
        ("d: 3\n", "a", "d: 3\n"),
    ],
)
def test_a_line_is_taken_out(before: str, path: str, after: str) -> None:
    assert YamlText(before, "f").without(path.split(".")).text == after


def test_text_that_looks_like_something_else_is_quoted() -> None:
    changed = YamlText("a: 1\n", "f").with_value(["a"], "true")
    assert parse(changed.text, "f") == {"a": "true"}


def test_what_is_no_section_is_not_made_one() -> None:
    with pytest.raises(ConfigError, match="by hand"):
        YamlText("a: '{}'\n", "f").with_value(["a", "b"], 1)


def test_secrets_do_not_come_out() -> None:
    text = YamlText("hub_token: abc\napi-key: null\nnested: [{password: x}]\napi_key_env: NAME\n", "f")
    assert text.without_secrets() == (
        f'hub_token: "{HIDDEN}"\napi-key: null\nnested: [{{password: "{HIDDEN}"}}]\napi_key_env: NAME\n'
    )


@pytest.mark.parametrize("name", ["HF_TOKEN", "api-key", "my_secret", "db.password", "OPENAI_API_KEY"])
def test_names_of_secrets(name: str) -> None:
    assert names_a_secret(name)


@pytest.mark.parametrize("name", ["tokenizer", "max-num-batched-tokens", "monkey", "api_key_env", "seed"])
def test_names_of_other_things(name: str) -> None:
    assert not names_a_secret(name)


def test_keys_are_known_by_their_shape() -> None:
    assert without_secrets("use hf_abcdefghijABCDEFGHIJ0123 now") == f"use {HIDDEN} now"
    assert without_secrets("--hf_overrides Qwen/Qwen3-8B") == "--hf_overrides Qwen/Qwen3-8B"

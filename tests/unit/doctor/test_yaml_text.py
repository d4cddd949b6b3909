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
        ("a: { x: 1 } # x\n", "a.b", "a: { x: 1, b: 9 } # x\n"),
        ("a: {x: 1, } # x\n", "a.b", "a: {x: 1, b: 9 } # x\n"),
        ("a: {\n  x: 1 # one,\n}\n", "a.b", "a: {\n  x: 1, b: 9 # one,\n}\n"),
        ("{x: 1}\n", "a", "{x: 1, a: 9}\n"),
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
        ("a:\n  b: 1\n  c: 2 # two\nd: 3\n", "a.c", "a:\n  b: 1\nd: 3\n"),
        ("a:\n  b: 1\n  # of c\n  c:\n    - x\n  d: 4\n", "a.c", "a:\n  b: 1\n  # of c\n  d: 4\n"),
        ("a:\n  b: {x: 1}\n  c: {\n    y: 2,\n  }\n", "a.c", "a:\n  b: {x: 1}\n"),
        ("a:\n  b:\n    c: 1\n  d: 2", "a.d", "a:\n  b:\n    c: 1\n"),
        # The only one: nothing below a key would be null, and null is not an empty section.
        ("a: # why\n  # of b\n  b: 1\nc: 2\n", "a.b", "a: {} # why\n  # of b\nc: 2\n"),
        ("a:\n  b:\n    c: 1\n", "a.b.c", "a:\n  b: {}\n"),
        ("a: &x\n  b: 1\n", "a.b", "a: &x {}\n"),
        ("# all\na: 1 # one\n", "a", "# all\n{}\n"),
    ],
)
def test_a_line_is_taken_out(before: str, path: str, after: str) -> None:
    assert taken_out(before, path) == after


@pytest.mark.parametrize(
    ("before", "path", "after"),
    [
        ("a: {b: 1, c: 2, d: 3} # all\n", "a.b", "a: {c: 2, d: 3} # all\n"),
        ("a: {b: 1, c: 2, d: 3} # all\n", "a.c", "a: {b: 1, d: 3} # all\n"),
        ("a: {b: 1, c: 2, d: 3} # all\n", "a.d", "a: {b: 1, c: 2} # all\n"),
        ("a: {b: 1} # all\n", "a.b", "a: {} # all\n"),
        ("a: { b: 1, c: 2 }\n", "a.b", "a: { c: 2 }\n"),
        ("a: { b: 1, c: 2 }\n", "a.c", "a: { b: 1 }\n"),
        ("a: { b: 1 }\n", "a.b", "a: { }\n"),
        ("a: {b: 1, c: 2,}\n", "a.c", "a: {b: 1, }\n"),
        ("a: {b: 1,}\n", "a.b", "a: {}\n"),
        ('{"a":1,"b":[1,2]}', "a", '{"b":[1,2]}'),
        ('{"a":1,"b":[1,2]}', "b", '{"a":1}'),
        ("a: {b: 'x, }', c: {d: [1, 2], e: 3}, f: }\n", "a.b", "a: {c: {d: [1, 2], e: 3}, f: }\n"),
        ("a: {b: 'x, }', c: {d: [1, 2], e: 3}, f: }\n", "a.c", "a: {b: 'x, }', f: }\n"),
        ("a: {b: 'x, }', c: {d: [1, 2], e: 3}, f: }\n", "a.c.d", "a: {b: 'x, }', c: {e: 3}, f: }\n"),
        ("a: {b: 'x, }', c: {d: [1, 2], e: 3}, f: }\n", "a.f", "a: {b: 'x, }', c: {d: [1, 2], e: 3} }\n"),
        ("x: &x 1\na: {b: *x, c: *x}\n", "a.b", "x: &x 1\na: {c: *x}\n"),
        ("a: {\n  b: 1, # one, two\n  c: 2 # three\n}\n", "a.b", "a: {\n  c: 2 # three\n}\n"),
        ("a: {\n  b: 1, # one, two\n  c: 2 # three\n}\n", "a.c", "a: {\n  b: 1 # one, two\n}\n"),
        ("a: {\n  b: 1 # one, two\n}\n", "a.b", "a: {\n}\n"),
        ("a: {b: 1, # one\n    c: 2}\n", "a.b", "a: { # one\n    c: 2}\n"),
        ("a: {b: 1, # one\n    c: 2}\n", "a.c", "a: {b: 1 # one\n    }\n"),
    ],
)
def test_between_braces_one_entry_is_taken_out(before: str, path: str, after: str) -> None:
    assert taken_out(before, path) == after


def taken_out(before: str, path: str) -> str:
    """The text without `path`, which is then not there while its section is."""
    *section, _ = keys = path.split(".")
    changed = YamlText(before, "f").without(keys)
    assert not changed.get(keys)[0]
    assert changed.get(section)[0]
    return changed.text


@pytest.mark.parametrize(
    ("before", "path"),
    [
        ("a: &x {b: 1, c: 2}\nd: *x\n", "a.b"),  # d would lose it too
        ("x: &x {b: 1}\na:\n  <<: *x\n  c: 2\n", "a.b"),  # stands elsewhere
    ],
)
def test_what_would_change_something_else_is_not_taken_out(before: str, path: str) -> None:
    with pytest.raises(ConfigError, match=rf"f: {path} .* by hand"):
        YamlText(before, "f").without(path.split("."))


def test_what_would_change_something_else_is_not_set() -> None:
    with pytest.raises(ConfigError, match=r"f: a\.b .* by hand"):
        YamlText("a: &x {b: 1}\nd: *x\n", "f").with_value(["a", "b"], 2)
    with pytest.raises(ConfigError, match=r"f: a .* by hand"):  # b would stand on its line
        YamlText("a:\n  c: 1\nb: 2\n", "f").with_value(["a"], 3)
    with pytest.raises(ConfigError, match=r"f: a-b .* by hand"):
        YamlText("a_b: 1\na-b: 2\n", "f").renamed(["a_b"], "a-b")


def test_a_number_that_is_none_is_no_difference() -> None:
    assert YamlText("a: .nan\nb: 1\n", "f").without(["b"]).text == "a: .nan\n"


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


@pytest.mark.parametrize(
    ("written", "hidden"),
    [
        ("api-key: [Company-1, 'Company-2'] # ours\n", 'api-key: ["(not shown)", "(not shown)"] # ours\n'),
        ("api-key:\n  - Company-1\n  - null\n", 'api-key:\n  - "(not shown)"\n  - null\n'),
        ("a: {tokens: 3, api_key: [[Company-1]]}\n", 'a: {tokens: 3, api_key: [["(not shown)"]]}\n'),
        ("api_key: {prod: Company-1, port: 80}\n", 'api_key: {prod: "(not shown)", port: "(not shown)"}\n'),
        ("api_key: {prod: [Company-1]}\n", 'api_key: {prod: ["(not shown)"]}\n'),
        ("api-key: &k abc\nhf-token: *k\n", 'api-key: &k "(not shown)"\nhf-token: *k\n'),
        ("x: &k !!str abc\napi-key: *k\n", 'x: &k "(not shown)"\napi-key: *k\n'),
        ("api-key: !!str &k\n  abc\nx: [*k]\n", 'api-key: &k "(not shown)"\nx: [*k]\n'),
        ("a: {api-key: &k 'b c', x: *k}\n", """a: {api-key: &k "(not shown)", x: *k}\n"""),
        ("api-key: |\n  abc\nseed: 1\n", 'api-key: "(not shown)"\nseed: 1\n'),
        ("api-key: &k >+ # ours\n  a\n  b\n\n# c\nx: *k\n", 'api-key: &k "(not shown)"\n\n# c\nx: *k\n'),
        ("a:\n  api-key: |\n    abc\n  seed: 1\n", 'a:\n  api-key: "(not shown)"\n  seed: 1\n'),
        ("api-key:\n  - |\n    abc\n  - d\n", 'api-key:\n  - "(not shown)"\n  - "(not shown)"\n'),
        ("api-key: |\n  abc", 'api-key: "(not shown)"'),
        ("a: &k |\n  abc\nb: *k\n", "a: &k |\n  abc\nb: *k\n"),
    ],
)
def test_whatever_stands_below_a_secret_is_hidden(written: str, hidden: str) -> None:
    assert YamlText(written, "f.yaml").without_secrets() == hidden
    assert YamlText(hidden, "f.yaml").values.keys() == YamlText(written, "f.yaml").values.keys()

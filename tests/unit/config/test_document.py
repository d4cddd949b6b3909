import pytest

from zerodrift.config.document import parse, render
from zerodrift.core.errors import ConfigError


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1.5e2", "1.e+2", "-2e8"])
def test_exponents_make_numbers_with_or_without_a_dot(text):
    assert parse(text, "here") == float(text)


@pytest.mark.parametrize(
    "text",
    ["1e", "e3", "1e-3x", "1e-3", "true", "null", "2026-01-01", "- a", "a: b", "", "ü\n\t🙂", "0x1f", "~"],
)
def test_text_comes_back_as_text(text):
    assert parse(render({"key": [text, text]}), "here") == {"key": [text, text]}


def test_equal_lists_are_written_out_twice():
    entries = ["a"]
    assert "&" not in render({"one": entries, "two": entries})


@pytest.mark.parametrize("text", ["a: 1\na: 2", "top:\n  a: 1\n  b: 2\n  a: 1", "{a: 1, 'a': 2}"])
def test_a_key_given_twice_is_refused_with_its_line(text):
    with pytest.raises(ConfigError, match=r"'a'.*line \d"):
        parse(text, "here")


def test_a_merge_key_may_be_overridden():
    assert parse("base: &b {x: 1, y: 2}\nother: {<<: *b, y: 3}", "here") == {
        "base": {"x": 1, "y": 2},
        "other": {"x": 1, "y": 3},
    }


@pytest.mark.parametrize(
    "text",
    [
        *("a: [", "a: b: c", "? [a]\n: 1", "2026-13-45", "[" * 2000, "a: \x00", "one\n---\ntwo", "*nobody"),
        "!!python/object/apply:os.system ['true']",
    ],
)
def test_anything_but_one_plain_value_is_refused(text):
    with pytest.raises(ConfigError):
        parse(text, "here")

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerodrift.bisect.launch_lines import applied, changes, read_line
from zerodrift.core.errors import ConfigError

LINE = "--dtype float32 --enforce-eager -tp 2 --seed=-1 --compilation-config '{\"level\": 3}'"


def test_a_line_is_flags_with_what_follows_them():
    settings = read_line(LINE)
    assert [setting.flag for setting in settings] == [
        "--dtype",
        "--enforce-eager",
        "-tp",
        "--seed",
        "--compilation-config",
    ]
    assert settings[-1].words == ("--compilation-config", '{"level": 3}')
    assert applied(settings, ()) == shlex.split(LINE)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve MODEL --dtype float32", "serve"),
        ("--port 8000", "--port"),
        ("--host=0.0.0.0", "--host"),
        ("--model x", "--model"),
        ("--api_key x", "--api-key"),
        ("--dtype 'float32", "words"),
    ],
)
def test_lines_that_are_refused(line, said):
    with pytest.raises(ConfigError, match=said):
        read_line(line)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("--a 1", "--a=1", []),
        ("--a_b 1", "--a-b 1", []),
        ("--a 1 --b", "--b --a 1", []),
        ("--a 1", "--a 2", ["--a 2 in place of --a 1"]),
        ("--x", "--no-x", ["--no-x in place of --x"]),
        ("--a", "", ["without --a"]),
        ("", "--a 1 --b", ["--a 1", "--b"]),
        ("--a 1 --a 2", "--a 2", ["--a 2 in place of --a 1 --a 2"]),
    ],
)
def test_what_differs(before, after, told):
    assert [change.text for change in changes(read_line(before), read_line(after))] == told


flags = st.sampled_from(["--a", "--b", "--c-d", "--e", "--no-e", "-f"])
lines = st.lists(
    st.tuples(flags, st.lists(st.sampled_from(["0", "1", "-1", "x y"]), max_size=2)).map(
        lambda each: [each[0], *each[1]]
    ),
    max_size=6,
).map(lambda settings: shlex.join([word for setting in settings for word in setting]))


@given(lines, lines)
def test_all_changes_make_one_line_of_the_other(one, other):
    before, after = read_line(one), read_line(other)
    made = changes(before, after)
    became = read_line(shlex.join(applied(before, made)))
    assert changes(became, after) == []
    assert len(made) <= len({setting.flag for setting in (*before, *after)})

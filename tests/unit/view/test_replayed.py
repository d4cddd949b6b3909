"""Tokens of a case in a terminal."""

import io

from rich.console import Console

from zerodrift.core.request import Prompt, Request
from zerodrift.records.case import Case
from zerodrift.view.text import print_replayed

CASE = Case(requests=(Request(Prompt((5, 6))),), limit=1e-3)


def printed(tokens: list[tuple[int, float, float]], problem: str = "") -> str:
    out = io.StringIO()
    print_replayed(CASE, tokens, problem, Console(file=out, width=100))
    return out.getvalue()


def test_each_token_is_right_or_wrong() -> None:
    text = printed([(7, -1.0, -1.0000001), (8, -1.0, -1.5), (9, -1.0, float("-inf"))])
    assert "prompt [5, 6]" in text
    rows = [line.split() for line in text.splitlines() if line.strip()[:1] in "789"]
    assert [row[-1] for row in rows] == ["right", "wrong", "wrong"]
    assert rows[1][:4] == ["8", "-1.000000", "-1.500000", "-0.5"]


def test_a_problem_stands_in_their_place_and_cannot_command_the_terminal() -> None:
    text = printed([], "the engine said \x1b[2J")
    assert "the engine said" in text
    assert "\x1b" not in text

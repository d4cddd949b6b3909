"""Pins of the engines' environments: one requirement a line. One had a carriage return in it, and TRL's could not be installed."""

import re
from pathlib import Path

import pytest

ENGINES = Path(__file__).parents[2] / "engines"
PIN = re.compile(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[^\s;]+")


@pytest.mark.parametrize("path", sorted(ENGINES.glob("*.constraints.txt")), ids=lambda path: path.stem)
def test_every_line_is_a_pin(path):
    lines = [line for line in path.read_bytes().decode().split("\n") if line and not line.startswith("#")]
    assert lines
    assert [line for line in lines if not PIN.fullmatch(line)] == []

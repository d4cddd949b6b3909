"""Every test that docs/first-contact.md names is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "first-contact.md").read_text())


def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_is_there() -> None:
    assert len(NAMED) > 40
    assert not {(path, name) for path, name in NAMED if name not in names_in(path)}


def test_one_that_is_not_there_would_be_seen() -> None:
    assert "test_nothing_of_the_kind" not in names_in("tests/docs/test_first_contact.py")

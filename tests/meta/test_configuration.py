"""Shipped configurations parse, and every setting says what it is for."""

import ast
from pathlib import Path

import pytest

from zerodrift.config.load import load
from zerodrift.config.shipped import Profile

PROFILES = sorted((Path(__file__).parents[2] / "src" / "zerodrift" / "config" / "profiles").iterdir())


def test_files_and_names_are_the_same_profiles() -> None:
    assert [path.name for path in PROFILES] == sorted(f"{profile}.yaml" for profile in Profile)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_parses(path: Path) -> None:
    load(path)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profiles_fit_a_screen(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert max(len(line) for line in lines) <= 120
    assert all(line == line.rstrip() for line in lines)


def test_every_setting_has_a_default_and_a_docstring(sources: dict[str, ast.Module]) -> None:
    structs = [
        node
        for path, tree in sources.items()
        if path.startswith("zerodrift/config/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and (node.name.endswith("Config") or node.name == "SamplingDefaults")
    ]
    assert len(structs) >= 7
    for struct in structs:
        for field, below in zip(struct.body, struct.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign):
                name = f"{struct.name}.{ast.unparse(field.target)}"
                assert field.value is not None, f"{name} has no default"
                documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                assert documented, f"{name} has no docstring"

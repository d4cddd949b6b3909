import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def sources() -> dict[str, ast.Module]:
    """Every file of the package as a syntax tree, by its path in `src`."""
    files = sorted((ROOT / "src" / "zerodrift").rglob("*.py"))
    trees = {
        file.relative_to(ROOT / "src").as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in files
    }
    assert "zerodrift/core/errors.py" in trees, "the package is not where these tests look for it"
    return trees

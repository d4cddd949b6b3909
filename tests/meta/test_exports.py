"""What `import zerodrift` promises exists, and nothing else does."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import zerodrift


@pytest.mark.parametrize("name", zerodrift.__all__)
def test_every_export_can_be_imported(name: str) -> None:
    assert getattr(zerodrift, name) is not None


@pytest.mark.parametrize("name", zerodrift._PACKAGES)
def test_every_package_can_be_imported(name: str) -> None:
    assert getattr(zerodrift, name) is import_module(f"zerodrift.{name}")


def test_the_lists_agree() -> None:
    assert set(zerodrift._EXPORTS) | {"__version__"} == set(zerodrift.__all__) - set(zerodrift._PACKAGES)
    assert len(zerodrift.__all__) == len(set(zerodrift.__all__))


def test_dir_lists_what_exists_before_it_is_used() -> None:
    """In a process of its own: here others have used everything."""
    listed = subprocess.run(
        [sys.executable, "-c", "import zerodrift; print(*dir(zerodrift))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert {*zerodrift.__all__, *zerodrift._PACKAGES} == {
        name for name in listed if not name.startswith("__") or name == "__version__"
    }, "and nothing that is no part of it: import_module, TYPE_CHECKING"


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = zerodrift.Nothing


def imported(tree: ast.Module) -> set[str]:
    """What a module imports for everybody, that is neither inside a function nor for type checkers only."""
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    return names | {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}


def test_packages_import_nothing_by_themselves(sources: dict[str, ast.Module]) -> None:
    """An import in an `__init__` is one that the layer contracts do not see, and that everybody pays for."""
    packages = {path: tree for path, tree in sources.items() if path.endswith("/__init__.py")}
    assert len(packages) > 5
    # What a lazy `__getattr__` needs.
    allowed = {"importlib", "typing", "zerodrift.core.lazy"}
    assert not {path: found for path, tree in packages.items() if (found := imported(tree) - allowed)}


def test_an_import_is_seen() -> None:
    assert imported(ast.parse("import a.b, c\nfrom d import e\ndef f(): import g")) == {"a.b", "c", "d"}


def test_every_module_says_what_it_is_for(sources: dict[str, ast.Module]) -> None:
    assert not [path for path, tree in sources.items() if not ast.get_docstring(tree)]


def test_the_version_is_that_of_the_package(root: Path) -> None:
    assert f'version = "{zerodrift.__version__}"' in (root / "pyproject.toml").read_text(encoding="utf-8")

"""The matrix as a module, and references that are loaded once."""

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zerodrift.backends.reference import ReferenceBackend


def _beside(name: str) -> ModuleType:
    # Test folders are no packages, so the module is found by its place, not by its name.
    spec = importlib.util.spec_from_file_location(f"faults_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def matrix() -> Any:
    """The module `matrix`: the same code that makes docs/faults.md."""
    return _beside("matrix")


@pytest.fixture(scope="session")
def blind() -> Any:
    """Bugs written without a look at the attribution: the first ten, …"""
    return _beside("blind")


@pytest.fixture(scope="session")
def unseen() -> Any:
    """… the second, …"""
    return _beside("unseen")


@pytest.fixture(scope="session")
def fresh() -> Any:
    """… the third, …"""
    return _beside("fresh")


@pytest.fixture(scope="session")
def foreign() -> Any:
    """… and the fourth."""
    return _beside("foreign")


@pytest.fixture(scope="session")
def would_have_caught() -> Any:
    """The module `would_have_caught`: the same code that makes docs/would-have-caught.md."""
    # Its folder is where a script finds the package `history`, and a test has to be told.
    sys.path.insert(0, str(Path(__file__).parent))
    return _beside("would_have_caught")


@pytest.fixture(scope="session")
def reference() -> Callable[[str], ReferenceBackend]:
    """In fp64; no audit changes it."""
    return cache(ReferenceBackend)

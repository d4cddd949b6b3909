"""Run directories to render: written once, read by every test."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _example_runs() -> ModuleType:
    # Test folders are no packages, so the module is found by its place, not by its name.
    spec = importlib.util.spec_from_file_location(
        "view_example_runs", Path(__file__).with_name("example_runs.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def examples() -> Any:
    """The module `example_runs`."""
    return _example_runs()


@pytest.fixture(scope="session")
def runs(examples: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each kind; tests that change files write one of their own."""
    base = tmp_path_factory.mktemp("runs")
    return {name: make(base / name) for name, make in examples.RUNS.items()}

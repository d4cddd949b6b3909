"""Run directories to render: written once, read by every test."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def examples(script: Callable[[str], ModuleType]) -> Any:
    """The module `example_runs`."""
    return script("unit/view/example_runs")


@pytest.fixture(scope="session")
def runs(examples: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each kind; tests that change files write one of their own."""
    base = tmp_path_factory.mktemp("runs")
    return {name: make(base / name) for name, make in examples.RUNS.items()}

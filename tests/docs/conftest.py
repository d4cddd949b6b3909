"""Scripts of tests/faults as modules: the pages that they write are checked against them."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "faults"


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """By its name; it finds what lies beside it."""

    def load(name: str) -> ModuleType:
        sys.path.insert(0, str(FOLDER))
        spec = importlib.util.spec_from_file_location(f"page_by_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load

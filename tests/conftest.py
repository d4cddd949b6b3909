"""How hard Hypothesis tries (HYPOTHESIS_PROFILE: dev while writing, ci by default, long in `make long`), what a skip means,
and scripts as modules."""

import importlib.util
import os
import sys
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# No deadline: a busy machine must not fail a test.
settings.register_profile("dev", max_examples=50, deadline=None)
# The same examples every time: whether a change lands is not drawn. `long` draws anew, and so does `dev`.
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="a skipped test fails: what it needs was installed just before, or was meant to be",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("--no-skips"):
        report.outcome = "failed"
    return report


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """A script below `tests` as a module, by its path; it finds what lies beside it, as when it is run."""

    @cache
    def load(path: str) -> ModuleType:
        # Test folders are no packages, so the module is found by its place, not by its name.
        file = Path(__file__).parent / f"{path}.py"
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        spec = importlib.util.spec_from_file_location(f"script_{path.replace('/', '_')}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load

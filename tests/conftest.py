"""How hard Hypothesis tries (HYPOTHESIS_PROFILE: dev while writing, ci by default, long before a release), and what a skip
means."""

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# No deadline: a busy machine must not fail a test.
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None)
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

"""The page of public bugs is what its results say, and has all of the bugs that are re-enacted."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from zerodrift.records.codec import read_lines

FOLDER = Path(__file__).parents[1] / "faults"
AGAIN = "run `make history`"


@pytest.fixture(scope="module")
def would_have_caught() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("page_of_bugs", FOLDER / "would_have_caught.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_its_results(would_have_caught: ModuleType) -> None:
    rows = list(read_lines(would_have_caught.RESULTS, would_have_caught.Row))
    assert would_have_caught.PAGE.read_text(encoding="utf-8") == would_have_caught.page(rows), AGAIN


def test_every_bug_was_run_on_each_of_its_models(would_have_caught: ModuleType) -> None:
    usual = (would_have_caught.USUAL, 0)
    rows = read_lines(would_have_caught.RESULTS, would_have_caught.Row)
    ran = {(row.bug, row.model) for row in rows if (row.tokens, row.seed) == usual}
    assert ran == {(bug.reported, model) for bug in would_have_caught.BUGS for model in bug.models}, AGAIN


def test_at_least_twenty_are_caught(would_have_caught: ModuleType) -> None:
    rows = list(read_lines(would_have_caught.RESULTS, would_have_caught.Row))
    missed = {
        row.bug for row in rows if (row.tokens, row.seed) == (would_have_caught.USUAL, 0) and not row.caught
    }
    assert len({row.bug for row in rows} - missed) >= 20

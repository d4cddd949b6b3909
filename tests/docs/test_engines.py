"""docs/engines.md says which engine gives what; the adapters say so too."""

from pathlib import Path

import pytest

from zerodrift.backends import llama_cpp, sglang, vllm
from zerodrift.backends.base import Capability
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.registry import IMPOSSIBLE, OPENERS

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


ENGINES = {
    "exact": set(ExactBackend.capabilities),
    "reference": set(ReferenceBackend.capabilities),
    "vllm": set(vllm.HINTS),
    "llama-cpp": set(llama_cpp.HINTS),
    "sglang": set(sglang.HINTS),
}


def shown() -> dict[str, set[str]]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if "|" in line
    ]
    start = next(number for number, row in enumerate(rows) if row[1:2] == ["exact"])
    names = rows[start][1:]
    table = rows[start + 2 : start + 2 + len(Capability)]
    assert [row[0] for row in table] == list(Capability)
    assert {cell for row in table for cell in row[1:]} == {"yes", "–"}
    return {name: {row[0] for row in table if row[1 + at] == "yes"} for at, name in enumerate(names)}


@pytest.mark.parametrize("name", ENGINES)
def test_the_table_of_capabilities(name: str) -> None:
    assert shown()[name] == ENGINES[name]


def test_every_engine_is_on_the_page() -> None:
    assert set(ENGINES) == set(OPENERS)
    assert list(shown()) == list(ENGINES)
    for name in (*OPENERS, *IMPOSSIBLE):
        assert f"`{name}`" in PAGE

"""docs/engines.md says which engine gives what; the adapters say so too."""

from pathlib import Path

import pytest

from zerodrift.backends import vllm
from zerodrift.backends.base import Capability
from zerodrift.backends.dialects.facts import Dialect
from zerodrift.backends.dialects.llama_cpp import LLAMA_CPP
from zerodrift.backends.dialects.sglang import SGLANG
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.registry import IMPOSSIBLE, OPENERS

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


def possible(dialect: Dialect) -> set[Capability]:
    """What a server of this kind can have, by its table."""
    found = {
        Capability.TOP_LOGPROBS: all(each.alternative_ids for each in dialect.numbers.values()),
        Capability.SCORE: dialect.scoring,
        Capability.SEED: True,
        Capability.TOKENIZE: dialect.tokenizer and dialect.tokenizer.chat_route,
        Capability.CACHE_SALT: dialect.salt,
        Capability.CACHED_TOKENS: dialect.cached_tokens,
        Capability.RESET_CACHE: dialect.reset_cache,
        Capability.LOAD_WEIGHTS: dialect.updating,
        Capability.WEIGHT_VERSION: dialect.updating,
        Capability.EFFECTIVE_CONFIG: dialect.facts.effective,
        Capability.STREAM: dialect.streaming,
    }
    assert set(found) == set(Capability)
    return {capability for capability, there in found.items() if there}


ENGINES = {
    "exact": set(ExactBackend.capabilities),
    "reference": set(ReferenceBackend.capabilities),
    "vllm": set(vllm.HINTS),
    **{dialect.name: possible(dialect) for dialect in (LLAMA_CPP, SGLANG)},
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

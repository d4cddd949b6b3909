"""docs/vllm.md shows what tests/engines/inconclusive.toml lists; the audits behind it run with the real engine."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = tomllib.loads((ROOT / "tests" / "engines" / "inconclusive.toml").read_text())
PAGE = (ROOT / "docs" / "vllm.md").read_text()


def test_every_entry_is_explained_and_shown() -> None:
    assert LISTED.keys() == {"started-by-us", "as-served"}
    for entries in LISTED.values():
        for probe, entry in entries.items():
            assert entry.keys() == {"says", "why", "fix"}, probe
            assert len(entry["why"].split()) > 4, probe
            assert f"| `{probe}` | {entry['why']} | `{entry['fix']}` |" in PAGE


def test_nothing_else_is_shown() -> None:
    table = PAGE.split("## What stays unanswered")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(entries) for entries in LISTED.values())

"""Sentences that a first user could not read, or that said what was not so, and that are gone: they do not come back."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RETIRED = (
    "the value read is that of",
    "200 of 2 are needed",
    "Noise is noise",
    "None of one's own",
    "keep sequences within the trained context",
    "see the replica named in the evidence",
    "off, or too short",
    "with --out DIR",
)


def said(folder: str) -> str:
    kinds = ("*.py", "*.yaml", "*.html", "*.md")
    return "\n".join(path.read_text() for kind in kinds for path in sorted((ROOT / folder).rglob(kind)))


@pytest.fixture(scope="module")
def texts() -> str:
    return said("src/zerodrift") + said("docs").replace((ROOT / "docs" / "first-contact.md").read_text(), "")


@pytest.mark.parametrize("sentence", RETIRED)
def test_it_is_said_no_more(sentence: str, texts: str) -> None:
    assert sentence not in texts


def test_what_is_said_would_be_found(texts: str) -> None:
    assert "each logprob belongs to the token before it" in texts


def test_no_rule_speaks_of_one_model() -> None:
    assert "Qwen3" not in said("src/zerodrift/doctor/rules")

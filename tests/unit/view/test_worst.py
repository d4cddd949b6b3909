from pathlib import Path
from typing import Any

import numpy as np

from zerodrift.view.panels import AROUND, worst
from zerodrift.view.run_directory import Tokens, read


def tokens_of(directory: Path) -> Tokens:
    tokens = read(directory).tokens
    assert tokens is not None
    return tokens


def test_the_worst_are_ranked_in_units_of_rounding(runs: dict[str, Path]) -> None:
    tokens = tokens_of(runs["failing"])
    found = worst(tokens)
    sigmas = np.abs(tokens.delta) / tokens.sigma
    assert [each.sigmas for each in found] == sorted(sigmas, reverse=True)[:20]
    assert found[0].delta == found[0].contracted - found[0].reported


def test_a_token_stands_among_its_own_neighbours(runs: dict[str, Path]) -> None:
    tokens = tokens_of(runs["failing"])
    texts = tokens.text.to_pylist()
    for found in worst(tokens):
        rows = np.flatnonzero(tokens.sequence == found.sequence)
        (row,) = rows[tokens.position[rows] == found.position]
        begin, end = max(rows[0], row - AROUND), min(rows[-1] + 1, row + AROUND + 1)
        assert [near.token for near in found.context] == tokens.token[begin:end].tolist()
        assert [near.worst for near in found.context].index(True) == row - begin
        assert sum(near.worst for near in found.context) == 1
        assert found.begins == (begin == rows[0])
        assert found.ends == (end == rows[-1] + 1)
        assert (
            texts[row].replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
            == found.context[row - begin].text
        )


def test_impossible_tokens_lead(runs: dict[str, Path]) -> None:
    found = worst(tokens_of(runs["hostile"]))
    assert found[0].sigmas == np.inf
    assert found[0].contracted == -np.inf
    assert np.isfinite(found[1].sigmas)


def test_long_and_hostile_texts_are_short_and_tame(runs: dict[str, Path]) -> None:
    texts = [near.text for found in worst(tokens_of(runs["hostile"])) for near in found.context]
    assert max(map(len, texts)) < 100
    assert all(text.isprintable() for text in texts)
    assert "A" * 40 + "… (10,000,000 characters)" in texts


def test_equal_tokens_are_not_listed(runs: dict[str, Path]) -> None:
    assert worst(tokens_of(runs["exact"])) == ()


def test_a_missing_text_is_empty(examples: Any, tmp_path: Path) -> None:
    drawn = examples.draw(sequences=1, length=12)
    drawn.columns["text"][0] = None
    directory = examples.write(tmp_path, examples.verdict("PASS", guilty="none", says=""), drawn)
    assert any(near.text == "" for found in worst(tokens_of(directory)) for near in found.context)

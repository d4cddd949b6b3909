"""Facts side by side, what rollouts are worth, and the worst tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerodrift.core.completion import EngineFingerprint
from zerodrift.stats.ratios import ClipFraction
from zerodrift.view.panels import AROUND, Fact, Usability, compare, usability, worst
from zerodrift.view.run_directory import Tokens, read


def fingerprint(engine: str, **numeric: str) -> EngineFingerprint:
    return EngineFingerprint(engine=engine, semantic={}, numeric=numeric, deployment={"host": engine})


def tokens_of(directory: Path) -> Tokens:
    tokens = read(directory).tokens
    assert tokens is not None
    return tokens


@pytest.fixture
def equal(runs: dict[str, Path]) -> Tokens:
    return tokens_of(runs["exact"])


def test_differences_come_first_and_silence_is_none() -> None:
    engine = fingerprint("vllm", torch="2.11", dtype="bfloat16", kernel="triton")
    reference = fingerprint("reference", torch="2.11", dtype="float32", attention="sdpa")
    semantic, numeric, deployment = compare(engine, reference)
    assert numeric.facts == (
        Fact("dtype", "bfloat16", "float32"),
        Fact("torch", "2.11", "2.11"),
        Fact("attention", None, "sdpa"),
        Fact("kernel", "triton", None),
    )
    assert [fact.differs for fact in numeric.facts] == [True, False, False, False]
    assert (numeric.num_differing, semantic.facts, deployment.facts[0].differs) == (1, (), True)
    assert numeric.engine_digest == engine.digests()["numeric"]
    assert numeric.reference_digest == reference.digests()["numeric"]


def test_what_rollouts_are_worth(equal: Tokens) -> None:
    found = usability(equal)
    assert isinstance(found, Usability)
    assert (found.token_ess, found.sequence_ess, found.sequences) == (1.0, 1.0, 8)
    assert {clip.outside for clip in found.clips} == {ClipFraction(0.0, 0.0)}
    found = usability(replace(equal, reported=equal.contracted - np.log(1.25)))
    assert isinstance(found, Usability)
    assert [(clip.low, clip.high) for clip in found.clips] == [(0.8, 1.2), (0.8, 1.28), (0.5, 2.0)]
    assert [clip.outside.above for clip in found.clips] == [1.0, 0.0, 0.0]
    contracted = equal.contracted.copy()
    contracted[0] = -np.inf
    found = usability(replace(equal, contracted=contracted))
    assert isinstance(found, Usability)
    assert found.token_ess == 1.0, "what the request excludes is left out"


def test_numbers_that_make_no_ratio_say_so(equal: Tokens) -> None:
    impossible = replace(equal, contracted=np.full(equal.reported.size, -np.inf))
    for tokens in (replace(equal, reported=equal.contracted - 400.0), impossible):
        assert isinstance(usability(tokens), str)


def test_the_worst_are_ranked_in_units_of_rounding_and_stand_among_their_neighbours(
    runs: dict[str, Path],
) -> None:
    tokens = tokens_of(runs["failing"])
    texts = tokens.text.to_pylist()
    sigmas = np.abs(tokens.delta) / tokens.sigma
    assert [each.sigmas for each in worst(tokens)] == sorted(sigmas, reverse=True)[:20]
    for found in worst(tokens):
        assert found.delta == found.contracted - found.reported
        rows = np.flatnonzero(tokens.sequence == found.sequence)
        (row,) = rows[tokens.position[rows] == found.position]
        begin, end = max(rows[0], row - AROUND), min(rows[-1] + 1, row + AROUND + 1)
        assert [near.token for near in found.context] == tokens.token[begin:end].tolist()
        assert [near.worst for near in found.context] == [place == row for place in range(begin, end)]
        assert (found.begins, found.ends) == (begin == rows[0], end == rows[-1] + 1)
        shown = texts[row].replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
        assert shown == found.context[row - begin].text


def test_impossible_tokens_lead_and_hostile_texts_are_short_and_tame(runs: dict[str, Path]) -> None:
    found = worst(tokens_of(runs["hostile"]))
    assert (found[0].sigmas, found[0].contracted) == (np.inf, -np.inf)
    assert np.isfinite(found[1].sigmas)
    texts = [near.text for each in found for near in each.context]
    assert max(map(len, texts)) < 100
    assert all(text.isprintable() for text in texts)
    assert "A" * 40 + "… (10,000,000 characters)" in texts


def test_equal_tokens_are_not_listed_and_a_missing_text_is_empty(
    equal: Tokens, examples: Any, tmp_path: Path
) -> None:
    assert worst(equal) == ()
    columns = examples.draw(sequences=1, length=12)
    columns["text"][0] = None
    tokens = tokens_of(examples.write(tmp_path, examples.verdict("PASS"), columns))
    assert any(near.text == "" for found in worst(tokens) for near in found.context)

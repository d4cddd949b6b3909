from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from zerodrift.stats.ratios import ClipFraction
from zerodrift.view.panels import Usability, usability
from zerodrift.view.run_directory import Tokens, read


@pytest.fixture
def tokens(runs: dict[str, Path]) -> Tokens:
    found = read(runs["exact"]).tokens
    assert found is not None
    return found


def test_equal_tokens_are_worth_all(tokens: Tokens) -> None:
    found = usability(tokens)
    assert isinstance(found, Usability)
    assert (found.token_ess, found.sequence_ess, found.sequences) == (1.0, 1.0, 8)
    assert {clip.outside for clip in found.clips} == {ClipFraction(0.0, 0.0)}


def test_ranges_are_those_in_use(tokens: Tokens) -> None:
    found = usability(replace(tokens, reported=tokens.contracted - np.log(1.25)))
    assert isinstance(found, Usability)
    assert [(clip.low, clip.high) for clip in found.clips] == [(0.8, 1.2), (0.8, 1.28), (0.5, 2.0)]
    assert [clip.outside.above for clip in found.clips] == [1.0, 0.0, 0.0]


def test_impossible_tokens_are_left_out(tokens: Tokens) -> None:
    contracted = tokens.contracted.copy()
    contracted[0] = -np.inf
    found = usability(replace(tokens, contracted=contracted))
    assert isinstance(found, Usability)
    assert found.token_ess == 1.0


def test_numbers_that_make_no_ratio_say_so(tokens: Tokens) -> None:
    found = usability(replace(tokens, reported=tokens.contracted - 400.0))
    assert isinstance(found, str)
    assert "does not belong to the sampled token" in found
    everything = usability(replace(tokens, contracted=np.full(tokens.reported.size, -np.inf)))
    assert everything == "log ratios is empty; a statistic needs at least one value"

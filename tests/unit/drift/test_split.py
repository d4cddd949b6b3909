"""What parts tokens that are off from those that are right: found where it is there, and by no chance where it is not."""

from collections.abc import Sequence

import numpy as np
import pytest

from zerodrift.drift.split import JudgedTokens, Property, find_split, likeliest_cut

PROMPTS, OUTPUT = 48, 20
LONG = (181, 260, 333, 512)


class Tokens:
    """Prompts of which four are long; each is asked as often as `samples` says."""

    def __init__(self, seed: int, prompts: int = PROMPTS, samples: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        lengths = self.rng.permutation([*self.rng.integers(5, 120, prompts - len(LONG)), *LONG])
        self.sequence = np.repeat(np.arange(prompts * samples), OUTPUT)
        self.prompt = self.sequence // samples
        self.length = lengths[self.prompt]
        self.index = np.tile(np.arange(OUTPUT), prompts * samples)
        self.position = self.length + self.index
        self.token = self.rng.integers(0, 500, len(self.sequence))
        self.count = prompts

    def properties(self) -> list[Property]:
        columns = {
            "prompt": self.length,
            "position": self.position,
            "output": self.index,
            "token": self.token,
            "request": self.sequence,
        }
        return [Property(name, values.astype(np.float64)) for name, values in columns.items()]

    def judged(self, wrong: np.ndarray, certain: float = 0.1) -> JudgedTokens:
        """Some of those that are wrong are certain, and stay right."""
        off = wrong & (self.rng.random(len(wrong)) >= certain)
        return JudgedTokens(np.where(off, 0.03, 1e-6), off, self.sequence, self.prompt)

    def chance(self, share: float) -> np.ndarray:
        """Whole prompts, by the dice."""
        wrong: np.ndarray = (self.rng.random(self.count) < share)[self.prompt]
        return wrong


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "value", "above"),
    [("prompt", 60, True), ("position", 93, True), ("output", 7, True), ("output", 0, False)],
)
def test_the_property_and_its_value_are_found(name, value, above, seed):
    tokens = Tokens(seed)
    (of,) = [each for each in tokens.properties() if each.name == name]
    wrong = of.values >= value if above else of.values <= value
    split = find_split(tokens.judged(wrong), tokens.properties(), tokens.rng)
    assert split is not None
    assert (split.cut.name, split.cut.above) == (name, above)
    low, high = sorted((split.cut.outside, split.cut.inside))
    assert low <= value <= high
    assert split.alike == ()
    assert (split.off_outside, split.p) == (0, pytest.approx(1 / 2000))
    assert split.share > 0.99


def test_a_position_and_a_length_that_no_output_tells_apart_are_told_together():
    tokens = Tokens(0)
    split = find_split(tokens.judged(tokens.length >= 150), tokens.properties(), tokens.rng)
    assert split is not None
    assert set(split.cuts) == {"prompt", "position"}
    assert split.cuts["prompt"].inside == split.cuts["position"].inside == min(LONG)
    assert split.cuts["position"].outside > split.cuts["prompt"].outside


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 1.0])
def test_prompts_that_are_off_by_chance_have_nothing_in_common(share):
    for seed in range(50):
        tokens = Tokens(seed, samples=2)
        assert find_split(tokens.judged(tokens.chance(share)), tokens.properties(), tokens.rng) is None


def test_tails_of_rounding_have_nothing_in_common():
    for seed in range(50):
        tokens = Tokens(seed)
        tails = tokens.rng.random(len(tokens.token)) < 0.01
        assert find_split(tokens.judged(tails, 0.0), tokens.properties(), tokens.rng) is None


def splits_of_few(alpha: float) -> Sequence[bool]:
    """Two of twelve prompts, whichever: often they are the longest, the first or the last two."""
    found = []
    for seed in range(40):
        tokens = Tokens(seed, prompts=12)
        pair = tokens.rng.permutation(12)[:2]
        wrong = np.isin(tokens.prompt, pair)
        found.append(find_split(tokens.judged(wrong), tokens.properties(), tokens.rng, alpha) is not None)
    return found


def test_few_prompts_part_by_chance_and_the_test_knows():
    assert sum(splits_of_few(1.0)) >= 2
    assert not any(splits_of_few(1e-3))


def test_one_prompt_asked_often_is_one_witness():
    tokens = Tokens(3, samples=4)
    wrong = tokens.length == max(LONG)
    assert wrong.sum() == 4 * OUTPUT
    assert find_split(tokens.judged(wrong), tokens.properties(), tokens.rng) is None


def test_what_grows_with_the_position_passes_the_gate_and_has_no_boundary():
    tokens = Tokens(1)
    size = 1e-4 * tokens.position
    judged = JudgedTokens(size, size > 1e-2, tokens.sequence, tokens.prompt)
    assert find_split(judged, tokens.properties(), tokens.rng) is None


def test_the_likeliest_cut_says_between_what_it_lies():
    values = np.array([1.0, 1.0, 4.0, 9.0, 9.0])
    cut = likeliest_cut(np.array([False, False, False, True, True]), Property("prompt", values))
    assert (cut.inside, cut.outside, cut.above) == (9.0, 4.0, True)
    cut = likeliest_cut(np.array([True, True, False, False, False]), Property("prompt", values))
    assert (cut.inside, cut.outside, cut.above) == (1.0, 4.0, False)

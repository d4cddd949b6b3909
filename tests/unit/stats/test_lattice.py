import numpy as np
import pytest

from zerodrift.stats.lattice import distances_on_grid, spacing

DIGITS = {"bf16": 7, "fp16": 10}


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """To so many binary digits behind the first, by hand."""
    step = np.exp2(np.floor(np.log2(np.abs(values))) - digits)
    return np.asarray(np.round(values / step) * step)


def logprobs(logits: np.ndarray) -> np.ndarray:
    """Reported in fp32, each pair less a number of its own."""
    rng = np.random.default_rng(1)
    return np.asarray((logits - rng.uniform(5, 15, (len(logits), 1))).astype(np.float32).astype(np.float64))


@pytest.fixture
def logits():
    rng = np.random.default_rng(0)
    return np.asarray(rng.uniform(0.6, 40.0, (2000, 2)) * rng.choice([-1.0, 1.0], (2000, 2)))


def judged(reported: np.ndarray, about: np.ndarray, digits: int):
    return distances_on_grid(reported[:, 0], reported[:, 1], (about[:, 0], about[:, 1]), digits)


@pytest.mark.parametrize("name", DIGITS)
def test_rounded_logits_lie_on_their_grid(logits, name):
    digits = DIGITS[name]
    # Sizes are known only to a few percent, as a reference knows them.
    about = logits * np.random.default_rng(2).uniform(0.95, 1.05, logits.shape)
    found = judged(logprobs(rounded(logits, digits)), about, digits)
    assert found.judged > 1000
    assert found.share == 1.0


@pytest.mark.parametrize("name", DIGITS)
def test_others_do_not_but_by_chance(logits, name):
    found = judged(logprobs(logits), logits, DIGITS[name])
    assert found.on <= 3 * found.by_chance + 5
    assert found.share < 0.05


def test_a_finer_grid_is_not_taken_for_a_coarser_one(logits):
    reported = logprobs(rounded(logits, DIGITS["fp16"]))
    assert judged(reported, logits, DIGITS["bf16"]).share < 0.3
    assert judged(reported, logits, DIGITS["fp16"]).share == 1.0


def test_spacing_near_a_power_of_two_is_the_finer_one():
    assert spacing(np.array([8.0, 8.5, 15.0]), 7).tolist() == [2.0**-5, 2.0**-5, 2.0**-4]


def test_where_steps_are_as_fine_as_rounding_nothing_is_judged():
    tiny = np.full((10, 2), 1e-4)
    assert judged(logprobs(tiny), tiny, 7).judged == 0

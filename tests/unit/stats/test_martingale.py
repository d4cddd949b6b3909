import msgspec
import numpy as np
import pytest
from scipy import special, stats

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.martingale import BEYOND_CHANCE, LARGEST_STEP, SamplingFidelity, sampling_fidelity


def row_moments(log_p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entropy, and variance of log p, of rows of logprobs."""
    p = np.exp(log_p)
    entropies = stats.entropy(p, axis=-1)
    return entropies, (p * (log_p + entropies[..., None]) ** 2).sum(axis=-1)


def zipf_rows(generator: np.random.Generator, tokens: int) -> np.ndarray:
    """Rows with the heavy tails of a language model; mean entropy 1.8 nats, mean variance 3.2 nats²."""
    return -generator.uniform(1.1, 3.0, size=(tokens, 1)) * np.log(np.arange(1, 513))


def sample(generator: np.random.Generator, logits: np.ndarray, temperature: float) -> SamplingFidelity:
    log_p = special.log_softmax(logits, axis=1)
    tokens = (logits / temperature + generator.gumbel(size=logits.shape)).argmax(axis=1)
    return sampling_fidelity(log_p[np.arange(len(tokens)), tokens], *row_moments(log_p))


def test_z_by_hand():
    found = sampling_fidelity([-0.5] * 16, [1.0] * 16, [4.0] * 16)
    assert (found.tokens, found.z, found.variance, found.largest_step) == (16, 1.0, 64.0, 0.0625)
    assert found.p_value == pytest.approx(2 * stats.norm.sf(1.0))
    assert not found.vacuous
    assert msgspec.json.decode(msgspec.json.encode(found), type=SamplingFidelity) == found


def test_p_values_are_uniform_where_tokens_are_sampled_as_claimed():
    generator = np.random.default_rng(0)
    found = []
    for _ in range(250):
        logits = generator.normal(size=(150, 24)) * generator.uniform(0.5, 3.0, size=(150, 1))
        found.append(sample(generator, logits, temperature=1.0))
    assert not any(one.vacuous for one in found)
    p_values = [one.p_value for one in found]
    assert stats.kstest(p_values, "uniform").pvalue > 0.05


def test_dependent_rows_are_no_excuse():
    # Each row's sharpness depends on the token before, as text does: the steps are still a martingale.
    generator = np.random.default_rng(1)
    p_values = []
    for _ in range(200):
        token, logprobs, rows = 0, [], []
        for noise, shape in zip(
            generator.gumbel(size=(80, 12)), generator.normal(size=(80, 12)), strict=True
        ):
            row = special.log_softmax(shape * (0.5 + token % 3))
            token = int((row + noise).argmax())
            logprobs.append(row[token])
            rows.append(row)
        p_values.append(sampling_fidelity(logprobs, *row_moments(np.array(rows))).p_value)
    assert stats.kstest(p_values, "uniform").pvalue > 0.05


def test_temperature_seven_tenths_claimed_as_one_needs_about_a_hundred_tokens():
    generator = np.random.default_rng(2)
    logits = zipf_rows(generator, 4000)
    assert 1 < row_moments(special.log_softmax(logits, axis=1))[0].mean() < 2
    found = sample(generator, logits, temperature=0.7)
    assert found.z > 20
    # z grows as the root of the number of tokens: 60 runs of 130 are at 5 sigma on average.
    assert 90 <= found.tokens * (5 / found.z) ** 2 <= 140
    runs = [sample(generator, zipf_rows(generator, 130), temperature=0.7).z for _ in range(60)]
    assert np.mean(runs) == pytest.approx(5, abs=0.4)


def test_flatter_sampling_than_claimed_is_negative():
    generator = np.random.default_rng(3)
    assert sample(generator, zipf_rows(generator, 1000), temperature=1.3).z < -5


def test_points_are_vacuous():
    found = sampling_fidelity([0.0] * 5, [0.0] * 5, [0.0] * 5)
    assert found.vacuous
    assert (found.z, found.p_value) == (0.0, 1.0)


def test_one_rare_token_among_certain_ones_is_vacuous_not_a_finding():
    log_p = np.log([[0.999, 0.001]])
    moments = row_moments(np.repeat(log_p, 80, axis=0))
    tokens = np.zeros(80, dtype=int)
    tokens[40] = 1
    found = sampling_fidelity(log_p[0, tokens], *moments)
    assert abs(found.z) > 3
    assert found.vacuous


def false_alarms(tokens: int, *, bounded: bool) -> float:
    """Exact share of honest runs of p = (0.999, 0.001) with |z| > 3: a run is its number of rare tokens."""
    log_p = np.log([0.999, 0.001])
    moments = row_moments(np.repeat(log_p[None], tokens, axis=0))
    total = 0.0
    for rare in range(25):
        found = sampling_fidelity(np.repeat(log_p, (tokens - rare, rare)), *moments)
        if abs(found.z) > 3 and not (bounded and found.vacuous):
            total += stats.binom.pmf(rare, tokens, 0.001)
    return total


@pytest.mark.parametrize("tokens", [83, 150, 314, 600, 1200, 1882, 2400, 4000])
def test_rare_tokens_do_not_raise_false_alarms(tokens):
    assert false_alarms(tokens, bounded=True) < 0.013


def test_without_the_bound_on_one_step_they_would():
    assert false_alarms(83, bounded=False) == pytest.approx(0.08, abs=0.005)


def steps(heavy: int, weight: float) -> SamplingFidelity:
    """400 tokens of entropy 1 and variance 1, `heavy` of them rarer than expected by `weight` deviations of the sum."""
    logprobs = np.full(400, -1.0)
    logprobs[:heavy] -= weight * 20
    return sampling_fidelity(logprobs, np.ones(400), np.ones(400))


@pytest.mark.parametrize(
    ("heavy", "weight", "vacuous"),
    [
        (0, 0.0, False),
        (10, 0.7, False),
        (10, 0.8, True),
        (1, 50.0, True),  # one token, however heavy, may be chance
        (2, 29.0, True),
        (2, 31.0, False),
        (100, 0.8, False),  # z = -80: no token stands out from the others
    ],
)
def test_heavy_tokens_decide_nothing_unless_there_are_many(heavy, weight, vacuous):
    found = steps(heavy, weight)
    assert found.z == pytest.approx(-heavy * weight)
    assert found.largest_step == pytest.approx(weight)
    assert found.vacuous is vacuous
    assert LARGEST_STEP < BEYOND_CHANCE


def test_a_hot_sampler_of_sharp_rows_is_no_chance():
    """0.7 nats of entropy, drawn at temperature 2: each step is heavy, and all of them are on one side."""
    generator = np.random.default_rng(5)
    for _ in range(20):
        logits = -generator.uniform(2.6, 3.4, size=(256, 1)) * np.log(np.arange(1, 513))
        found = sample(generator, logits, temperature=2.0)
        assert found.z < -30
        assert not found.vacuous


def test_a_hair_above_zero_is_rounding():
    """A softmax in fp32 may give the only token a logprob of 1e-7."""
    assert sampling_fidelity([1e-7, -2.0], [1.0, 1.0], [1.0, 1.0]).z == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("logprobs", "entropies", "variances", "message"),
    [
        ([0.1], [1.0], [1.0], r"logprobs\[0\]"),
        ([-1.0], [-0.1], [1.0], r"entropies\[0\]"),
        ([-1.0], [1.0], [-1e-9], r"variances\[0\]"),
        ([-1.0], [1.0, 1.0], [1.0], "shape"),
        ([-1.0], [1.0], [1.0, 1.0], "shape"),
        ([], [], [], "empty"),
    ],
)
def test_impossible_moments_are_refused(logprobs, entropies, variances, message):
    with pytest.raises(InvalidValue, match=message):
        sampling_fidelity(logprobs, entropies, variances)

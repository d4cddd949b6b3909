import math

import msgspec
import numpy as np
import pytest
from scipy import special, stats

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats.martingale import (
    RowMoments,
    SamplingFidelity,
    row_moments,
    sampling_fidelity,
)


def zipf_rows(generator: np.random.Generator, tokens: int) -> np.ndarray:
    """Rows with the heavy tails of a language model; mean entropy 1.8 nats, mean variance 3.2 nats²."""
    return -generator.uniform(1.1, 3.0, size=(tokens, 1)) * np.log(np.arange(1, 513))


def sample(generator: np.random.Generator, logits: np.ndarray, temperature: float) -> SamplingFidelity:
    log_p = special.log_softmax(logits, axis=1)
    tokens = (logits / temperature + generator.gumbel(size=logits.shape)).argmax(axis=1)
    return sampling_fidelity(log_p[np.arange(len(tokens)), tokens], *row_moments(log_p))


def test_moments_of_rows_by_hand_and_by_scipy() -> None:
    uniform = row_moments(np.zeros((1, 8)))
    assert uniform.entropies[0] == pytest.approx(math.log(8))
    assert uniform.variances[0] == pytest.approx(0.0, abs=1e-30)
    p = np.array([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]])
    found = row_moments(np.log(p))
    np.testing.assert_allclose(found.entropies, stats.entropy(p, axis=1))
    np.testing.assert_allclose(
        found.variances, (p * np.log(p) ** 2).sum(axis=1) - stats.entropy(p, axis=1) ** 2
    )
    shifted = row_moments(np.log(p) + 100.0)
    np.testing.assert_allclose(shifted.entropies, found.entropies)


def test_z_by_hand() -> None:
    found = sampling_fidelity([-0.5] * 16, [1.0] * 16, [4.0] * 16)
    assert (found.tokens, found.z, found.variance, found.largest_step) == (16, 1.0, 64.0, 0.0625)
    assert found.p_value == pytest.approx(2 * stats.norm.sf(1.0))
    assert not found.vacuous
    assert found.tokens_to_sigma(5) == 400
    assert found.tokens_to_sigma(0.5) == 4
    assert msgspec.json.decode(msgspec.json.encode(found), type=SamplingFidelity) == found


def test_p_values_are_uniform_where_tokens_are_sampled_as_claimed() -> None:
    generator = np.random.default_rng(0)
    found = []
    for _ in range(250):
        logits = generator.normal(size=(150, 24)) * generator.uniform(0.5, 3.0, size=(150, 1))
        found.append(sample(generator, logits, temperature=1.0))
    assert not any(one.vacuous for one in found)
    p_values = [one.p_value for one in found]
    assert stats.kstest(p_values, "uniform").pvalue > 0.05


def test_dependent_rows_are_no_excuse() -> None:
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
        p_values.append(sampling_fidelity(logprobs, *row_moments(rows)).p_value)
    assert stats.kstest(p_values, "uniform").pvalue > 0.05


def test_temperature_seven_tenths_claimed_as_one_needs_about_a_hundred_tokens() -> None:
    generator = np.random.default_rng(2)
    logits = zipf_rows(generator, 4000)
    assert 1 < row_moments(logits).entropies.mean() < 2
    found = sample(generator, logits, temperature=0.7)
    assert found.z > 20
    assert 90 <= (found.tokens_to_sigma(5) or 0) <= 140
    # The forecast is right: 60 runs of that length are at 5 sigma on average.
    runs = [sample(generator, zipf_rows(generator, 130), temperature=0.7).z for _ in range(60)]
    assert np.mean(runs) == pytest.approx(5, abs=0.4)


def test_flatter_sampling_than_claimed_is_negative() -> None:
    generator = np.random.default_rng(3)
    assert sample(generator, zipf_rows(generator, 1000), temperature=1.3).z < -5


def test_points_are_vacuous() -> None:
    found = sampling_fidelity([0.0] * 5, [0.0] * 5, [0.0] * 5)
    assert found.vacuous
    assert (found.z, found.p_value) == (0.0, 1.0)
    assert found.tokens_to_sigma() is None


def test_one_rare_token_among_certain_ones_is_vacuous_not_a_finding() -> None:
    log_p = np.log([[0.999, 0.001]])
    moments = row_moments(np.repeat(log_p, 80, axis=0))
    tokens = np.zeros(80, dtype=int)
    tokens[40] = 1
    found = sampling_fidelity(log_p[0, tokens], *moments)
    assert abs(found.z) > 3
    assert found.vacuous
    assert found.tokens_to_sigma() is None


def test_rare_tokens_do_not_raise_false_alarms() -> None:
    # Honest two-valued rows: without the bound on one step, |z| > 3 comes 8 times in 100 runs, not 0.3.
    generator, log_p = np.random.default_rng(4), np.log([0.999, 0.001])
    moments = row_moments(np.repeat(log_p[None], 83, axis=0))
    draws = (generator.random((1000, 83)) < 0.001).astype(int)
    found = [sampling_fidelity(log_p[tokens], *moments) for tokens in draws]
    assert 0.06 < np.mean([abs(one.z) > 3 for one in found]) < 0.1
    assert not any(abs(one.z) > 3 for one in found if not one.vacuous)


def test_no_growth_has_no_forecast() -> None:
    assert sampling_fidelity([-1.0] * 9, [1.0] * 9, [1.0] * 9).tokens_to_sigma() is None


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
def test_impossible_moments_are_refused(
    logprobs: list[float], entropies: list[float], variances: list[float], message: str
) -> None:
    with pytest.raises(InvalidValue, match=message):
        sampling_fidelity(logprobs, entropies, variances)


def test_bad_rows_and_bad_sigma_are_refused() -> None:
    with pytest.raises(NonFinite):
        row_moments([[0.0, -np.inf]])
    with pytest.raises(InvalidValue, match="shape"):
        row_moments([0.0, 1.0])
    with pytest.raises(InvalidValue, match="sigma"):
        sampling_fidelity([-0.5] * 9, [1.0] * 9, [1.0] * 9).tokens_to_sigma(-1)
    assert isinstance(row_moments([[0.0, 1.0]]), RowMoments)

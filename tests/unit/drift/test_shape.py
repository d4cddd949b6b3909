import numpy as np
import pytest

from zerodrift.drift.shape import describe, shape
from zerodrift.drift.tokens import TokenTable, no_masses

SEQUENCES, LENGTH = 10, 20


def table(delta: np.ndarray, **columns: np.ndarray) -> TokenTable:
    rng = np.random.default_rng(0)
    contracted = columns.pop("contracted", rng.uniform(-4, 0, SEQUENCES * LENGTH))
    index = np.tile(np.arange(LENGTH), SEQUENCES)
    zeros = np.zeros(SEQUENCES * LENGTH)
    values = {
        "sequence": np.repeat(np.arange(SEQUENCES), LENGTH),
        "index": index,
        "position": index + np.repeat(10 * np.arange(SEQUENCES), LENGTH),
        "token": rng.integers(0, 10_000, SEQUENCES * LENGTH),
        "reported": np.where(np.isfinite(contracted), contracted, -1.0) - delta,
        "contracted": contracted,
        **columns,
    }
    unused = dict.fromkeys(("entropy", "variance", "by_likelihood", "by_id"), zeros)
    masses = no_masses(len(delta), 10_000)
    return TokenTable(raw=contracted, sigma=zeros + 1e-6, masses=masses, ends_told=True, **unused, **values)


@pytest.fixture
def noise():
    return np.random.default_rng(1).choice([-1e-3, 1e-3], SEQUENCES * LENGTH)


def test_noise_points_nowhere(noise):
    for name, value in shape(table(noise)).items():
        limit = 1.0 if name == "sequence_concentration" else 0.2
        assert abs(value) <= limit + 1e-6, name


def test_a_temperature_shows_in_the_slope_on_log_p(noise):
    plain = table(noise)
    assert shape(table(0.1 * plain.contracted))["slope_on_log_p"] == pytest.approx(1.0)
    assert shape(table(-0.1 * plain.contracted))["slope_on_log_p"] == pytest.approx(-1.0)


def test_a_rotary_fault_grows_with_position(noise):
    plain = table(noise)
    assert shape(table(noise * plain.position))["growth_with_position"] > 0.95


def test_the_first_token_against_the_rest(noise):
    first = table(noise).index == 0
    assert shape(table(np.where(first, 8 * noise, noise)))["first_token_excess"] == pytest.approx(np.log(8))


def test_tokens_seen_before_against_new_ones(noise):
    """Only within their own output: the same token in another sequence is new."""
    token = np.tile(np.arange(LENGTH) % 15, SEQUENCES)
    repeated = np.tile(np.arange(LENGTH) >= 15, SEQUENCES)
    delta = np.where(repeated, 5 * noise, noise)
    assert shape(table(delta, token=token))["repeated_token_excess"] == pytest.approx(np.log(5))
    assert shape(table(delta))["repeated_token_excess"] == pytest.approx(0.0, abs=1.0)


def test_a_bias_has_a_sign(noise):
    assert shape(table(np.abs(noise)))["signed_bias"] == pytest.approx(1.0)
    assert shape(table(-np.abs(noise)))["signed_bias"] == pytest.approx(-1.0)


def test_one_broken_sequence_stands_out(noise):
    broken = np.repeat(np.arange(SEQUENCES) == 3, LENGTH)
    assert shape(table(np.where(broken, noise, 0.0)))["sequence_concentration"] == pytest.approx(SEQUENCES)


def test_no_difference_at_all_is_no_direction():
    assert set(shape(table(np.zeros(SEQUENCES * LENGTH))).values()) == {0.0}


def test_excluded_tokens_are_left_out(noise):
    contracted = np.full(SEQUENCES * LENGTH, -1.0)
    contracted[::7] = -np.inf
    assert np.isfinite(list(shape(table(noise, contracted=contracted)).values())).all()
    nothing = shape(table(noise, contracted=np.full(SEQUENCES * LENGTH, -np.inf)))
    assert nothing == {"possible_tokens": 0.0}


def test_a_sentence_for_people(noise):
    """Of each direction by itself; noise has none of them."""
    plain, first = table(noise), table(noise).index == 0
    nowhere = describe(shape(plain))
    told = {
        describe(shape(table(0.1 * plain.contracted))),
        describe(shape(table(noise * plain.position))),
        describe(shape(table(np.where(first, 8 * noise, noise)))),
        describe(shape(table(np.abs(noise)))),
        describe(shape(table(np.where(np.repeat(np.arange(SEQUENCES) == 3, LENGTH), noise, 0.0)))),
        describe(shape(table(noise, contracted=np.full(SEQUENCES * LENGTH, -np.inf)))),
    }
    assert len(told) == 6
    assert nowhere not in told
    assert "8.0 times" in describe({"first_token_excess": np.log(8)})
    # Which side is said as people would.
    assert describe({"signed_bias": 0.9}) != describe({"signed_bias": -0.9})

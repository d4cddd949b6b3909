import numpy as np
import pytest

from zerodrift.core.cause import UNEXPLAINED
from zerodrift.sync.judge import Arrival, CanaryScores, Shares, SideFacts, judge

TOKENS, LENGTH = 1024, 16
SEQUENCE = np.repeat(np.arange(TOKENS // LENGTH), LENGTH)
NEW = SideFacts(says_new=True, answers_as="step 1")
SILENT = SideFacts()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def scored(rng, change, noise=0.3, before=None, after=None):
    """An engine that errs by `noise`, and got `change` of an update."""
    old, p = rng.normal(-3, 1, TOKENS), rng.normal(size=TOKENS)
    observed = change(p)
    return CanaryScores(
        old,
        old + p,
        old + (noise if before is None else before) * rng.normal(size=TOKENS),
        old + observed + (noise if after is None else after) * rng.normal(size=TOKENS),
        SEQUENCE,
    )


def of(scores, parts=None, told=NEW):
    found = judge(scores, Shares(parts or {}), told)
    return found.arrival, found.cause


def test_what_arrived_is_confirmed(rng):
    assert of(scored(rng, lambda p: p)) == (Arrival.CONFIRMED, None)


def test_equal_bits_are_confirmed(rng):
    assert of(scored(rng, lambda p: p, noise=0)) == (Arrival.CONFIRMED, None)


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        (SILENT, "weights/stale"),
        (SideFacts(answers_as="step 0"), "weights/stale"),
        (NEW, "weights/version-label"),
    ],
)
@pytest.mark.parametrize("noise", [0.3, 0.0])
def test_what_never_arrived_is_named_by_its_label(rng, told, cause, noise):
    assert of(scored(rng, lambda p: 0 * p, noise), told=told) == (Arrival.MISSED, cause)


def test_new_weights_under_another_label(rng):
    told = SideFacts(answers_as="step 0")
    assert of(scored(rng, lambda p: p), told=told) == (Arrival.MISSED, "weights/version-label")


def test_half_of_the_canaries_at_the_old_weights_are_a_replica(rng):
    half = SEQUENCE % 2
    assert of(scored(rng, lambda p: p * half)) == (Arrival.MISSED, "weights/replica")


@pytest.mark.parametrize(("times", "cause"), [(0.5, "weights/fraction"), (2.0, "weights/multiple")])
def test_not_once(rng, times, cause):
    assert of(scored(rng, lambda p: times * p)) == (Arrival.MISSED, cause)


def with_parts(rng, count, missing):
    """An update in `count` parts of equal size, of which some are missing."""
    columns = {f"layer {number}": rng.normal(size=TOKENS) for number in range(count)}
    p = sum(columns.values())
    lacking = sum((columns[f"layer {number}"] for number in missing), np.zeros(TOKENS))
    old = rng.normal(-3, 1, TOKENS)
    errors = 0.3 * rng.normal(size=(2, TOKENS))
    return CanaryScores(old, old + p, old + errors[0], old + p - lacking + errors[1], SEQUENCE), columns


@pytest.mark.parametrize("missing", [(1,), (0, 2)])
def test_layers_that_are_missing_are_named(rng, missing):
    scores, parts = with_parts(rng, 4, missing)
    found = judge(scores, Shares(parts), NEW)
    assert (found.arrival, found.cause) == (Arrival.MISSED, "weights/partial")
    assert found.message.endswith(", ".join(f"layer {number}" for number in missing))


def test_one_layer_of_many_is_seen_by_itself(rng):
    """One of forty: the slope of the whole is 0.975, and within what is not refused."""
    scores, parts = with_parts(rng, 40, (7,))
    found = judge(scores, Shares(parts), NEW)
    assert not found.fit.refuses(1.0)
    assert (found.arrival, found.cause) == (Arrival.MISSED, "weights/partial")
    assert found.message.endswith("layer 7")


def with_ranks(rng, layers, ranks, missing):
    """The same update cut twice: along its layers and across all of them."""
    pieces = rng.normal(size=(layers, ranks, TOKENS))
    by_layer = {f"layer {number}": pieces[number].sum(axis=0) for number in range(layers)}
    by_rank = {f"rank {number} of {ranks}": pieces[:, number].sum(axis=0) for number in range(ranks)}
    p = pieces.sum(axis=(0, 1))
    errors = 0.3 * rng.normal(size=(2, TOKENS))
    observed = p - pieces[:, missing].sum(axis=(0, 1))
    return CanaryScores(p * 0, p, errors[0], observed + errors[1], SEQUENCE), Shares(by_layer, by_rank)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_without_the_update_is_no_layer_and_no_fraction(rng, ranks):
    found = judge(*with_ranks(rng, 4, ranks, [ranks - 1]), NEW)
    assert (found.arrival, found.cause) == (Arrival.MISSED, "weights/rows")
    assert f"rank {ranks - 1} of {ranks}" in found.message
    assert "layer" not in found.message


def test_a_layer_that_is_missing_at_all_ranks_and_half_of_everything_are_no_rank(rng):
    scores, shares = with_ranks(rng, 4, 2, [])
    without = scores._replace(engine_after=scores.engine_after - shares.parts["layer 1"])
    assert judge(without, shares, NEW).message.endswith(": layer 1")
    half = scores._replace(engine_after=scores.engine_after - scores.predicted / 2)
    assert judge(half, shares, NEW).cause == "weights/fraction"
    assert judge(scores, shares, NEW).arrival is Arrival.CONFIRMED


def test_nothing_is_missing_of_what_arrived_in_parts(rng):
    assert of(*with_parts(rng, 40, ())) == (Arrival.CONFIRMED, None)


def test_other_weights_are_off_and_not_along_the_update(rng):
    assert of(scored(rng, lambda p: p, after=1.0)) == (Arrival.MISSED, UNEXPLAINED)
    assert of(scored(rng, lambda p: p), told=NEW._replace(gate=0.1)) == (Arrival.MISSED, UNEXPLAINED)
    assert of(scored(rng, lambda p: p), told=NEW._replace(gate=0.5)) == (Arrival.CONFIRMED, None)


def test_what_an_engine_always_gets_wrong_is_none_of_the_updates(rng):
    """A bias of ten times the update, before and after."""
    scores = scored(rng, lambda p: p)
    bias = 10 * rng.normal(size=TOKENS)
    biased = scores._replace(
        engine_before=scores.engine_before + bias, engine_after=scores.engine_after + bias
    )
    assert of(biased) == (Arrival.CONFIRMED, None)


def test_an_update_below_the_noise_is_not_judged_and_says_what_would_do(rng):
    found = judge(scored(rng, lambda p: p, noise=4.0), Shares(), NEW)
    assert (found.arrival, found.cause) == (Arrival.INCONCLUSIVE, None)
    assert found.needed is not None
    assert TOKENS < found.needed < 64 * TOKENS


def test_an_update_that_moves_nothing(rng):
    scores = scored(rng, lambda p: 0 * p)._replace(
        trainer_after=np.zeros(TOKENS), trainer_before=np.zeros(TOKENS)
    )
    found = judge(scores, Shares(), NEW)
    assert (found.arrival, found.needed) == (Arrival.INCONCLUSIVE, None)
    again = NEW._replace(same_digest=True)
    assert of(scores, told=again._replace(settled=True)) == (Arrival.CONFIRMED, None)
    assert of(scores, told=again) == (Arrival.INCONCLUSIVE, None)


def test_a_cache_that_the_old_weights_wrote(rng):
    told = NEW._replace(cached_tokens=256)
    assert of(scored(rng, lambda p: p), told=told) == (Arrival.MISSED, "weights/stale-prefix-cache")


def test_where_no_update_came_the_cache_is_not_to_blame(rng):
    told = SideFacts(answers_as="step 0", cached_tokens=256)
    assert of(scored(rng, lambda p: 0 * p), told=told) == (Arrival.MISSED, "weights/stale")


def test_another_digest(rng):
    told = NEW._replace(other_digest=True)
    assert of(scored(rng, lambda p: p), told=told) == (Arrival.MISSED, UNEXPLAINED)

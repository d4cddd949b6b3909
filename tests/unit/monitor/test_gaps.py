"""Three gaps kept apart: what the given numbers show, and what they cannot."""

import math

import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.correction import masked, truncated
from zerodrift.monitor.decision import Code, Measured, NotObservable, State
from zerodrift.monitor.monitor import Monitor
from zerodrift.stats.ratios import sequence_ess, token_ess

RNG = np.random.default_rng(0)
SHAPE = (40, 25)
BEHAVIOR = -RNG.exponential(1.0, SHAPE) - 0.5
RESCORED = BEHAVIOR + RNG.normal(0, 0.01, SHAPE)
OLD = RESCORED + RNG.normal(0, 0.1, SHAPE)
CURRENT = OLD + RNG.normal(0.02, 0.05, SHAPE)


def observe(**given):
    return Monitor().observe(**given)


def test_the_three_gaps_are_those_of_their_two_policies():
    found = observe(
        behavior_logprobs=BEHAVIOR,
        rescored_logprobs=RESCORED,
        old_logprobs=OLD,
        current_logprobs=CURRENT,
        versions=3,
        trainer_version=5,
    )
    for gap, delta in (
        (found.mismatch, RESCORED - BEHAVIOR),
        (found.staleness, OLD - RESCORED),
        (found.update, CURRENT - OLD),
        (found.total, CURRENT - BEHAVIOR),
    ):
        assert isinstance(gap, Measured)
        flat, rows = delta.ravel(), np.repeat(np.arange(40), 25)
        assert gap.tokens == 1000
        assert gap.bias == pytest.approx(flat.mean(), abs=1e-12)
        assert gap.mean_abs == pytest.approx(np.abs(flat).mean())
        assert gap.k1 == pytest.approx(-flat.mean(), abs=1e-12)
        assert gap.k2 == pytest.approx((flat**2).mean() / 2)
        assert gap.k3 == pytest.approx((np.expm1(flat) - flat).mean())
        assert gap.p90 == pytest.approx(np.quantile(np.abs(flat), 0.9), rel=0.08)
        assert gap.token_ess == pytest.approx(token_ess(flat))
        assert gap.sequence_ess == pytest.approx(sequence_ess(flat, rows))
        assert gap.clip_rate == pytest.approx(np.mean((flat < math.log(0.8)) | (flat > math.log(1.2))))
    assert found.entropy == pytest.approx(-BEHAVIOR.mean())
    assert (found.lag_mean, found.lag_max) == (2, 2)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("unscored", [np.nan, -0.7])
def test_the_mismatch_of_tokens_that_were_scored_again(per_token, unscored):
    """Re-scoring all of a batch costs a forward more: a part of it shows the mismatch too, and nothing is made up for the rest."""
    chosen = np.arange(40) % 8 == 0
    mask = np.repeat(chosen[:, None], 25, axis=1)
    found = observe(
        behavior_logprobs=BEHAVIOR,
        rescored_logprobs=np.where(mask, RESCORED, unscored),
        rescored_mask=mask if per_token else chosen,
        old_logprobs=OLD,
        versions=3,
        trainer_version=5,
    )
    assert isinstance(found.mismatch, Measured)
    assert found.mismatch.tokens == 125
    assert found.mismatch.bias == pytest.approx((RESCORED - BEHAVIOR)[mask].mean(), abs=1e-12)
    assert isinstance(found.staleness, NotObservable), "of a part that nobody drew at random"
    assert isinstance(found.total, Measured)
    assert found.total.tokens == 1000


def test_tokens_of_the_trainer_s_own_weights_are_seen_beside_those_that_were_scored_again():
    versions = np.where(np.arange(40) < 10, 5, 4)
    scored = np.arange(40) >= 30
    found = observe(
        behavior_logprobs=BEHAVIOR, rescored_logprobs=RESCORED, rescored_mask=scored, old_logprobs=OLD,
        versions=versions, trainer_version=5,
    )  # fmt: skip
    assert isinstance(found.mismatch, Measured)
    both = np.concatenate([(OLD - BEHAVIOR)[:10], (RESCORED - BEHAVIOR)[30:]])
    assert found.mismatch.tokens == 500
    assert found.mismatch.mean_abs == pytest.approx(np.abs(both).mean())


def test_a_mask_of_all_or_none_is_as_if_it_were_not_given():
    asked = {"behavior_logprobs": BEHAVIOR, "old_logprobs": OLD, "versions": 3, "trainer_version": 5}
    every, none = (
        observe(**asked, rescored_logprobs=RESCORED, rescored_mask=np.full(40, value))
        for value in (True, False)
    )
    assert every == observe(**asked, rescored_logprobs=RESCORED)
    assert none == observe(**asked)
    with pytest.raises(InvalidValue):
        observe(**asked, rescored_mask=np.full(40, fill_value=True))


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"old_logprobs": OLD}, set()),
        ({"old_logprobs": OLD, "versions": 5, "trainer_version": 5}, {"mismatch"}),
        ({"current_logprobs": OLD, "versions": 5, "trainer_version": 5}, {"mismatch"}),
        ({"old_logprobs": OLD, "versions": 4, "trainer_version": 5}, set()),
        ({"rescored_logprobs": RESCORED}, {"mismatch"}),
        ({"rescored_logprobs": RESCORED, "old_logprobs": OLD}, {"mismatch", "staleness"}),
        (
            {"rescored_logprobs": RESCORED, "old_logprobs": OLD, "versions": 5, "trainer_version": 5},
            {"mismatch"},
        ),
        ({"old_logprobs": OLD, "current_logprobs": CURRENT}, {"update"}),
        ({}, set()),
    ],
)
def test_what_the_numbers_cannot_show_is_not_observable(given, seen):
    found = observe(behavior_logprobs=BEHAVIOR, **given)
    gaps = {name: getattr(found, name) for name in ("mismatch", "staleness", "update")}
    assert {name for name, gap in gaps.items() if gap.observable} == seen
    assert all(gap.why for gap in gaps.values() if isinstance(gap, NotObservable))


def test_tokens_of_lag_zero_show_the_mismatch_and_others_do_not():
    versions = np.where(np.arange(25) < 10, 4, 5) * np.ones((40, 1), int)
    found = observe(behavior_logprobs=BEHAVIOR, old_logprobs=OLD, versions=versions, trainer_version=5)
    assert found.mismatch.tokens == 40 * 15
    assert found.mismatch.mean_abs == pytest.approx(np.abs(OLD - BEHAVIOR)[:, 10:].mean())
    sums = (OLD - BEHAVIOR)[:, 10:].sum(axis=1)
    assert found.mismatch.sequence_ess == pytest.approx(token_ess(sums))
    assert found.lag_mean == pytest.approx(0.4)


def test_layouts_of_one_batch_give_one_answer():
    lengths = RNG.integers(1, 26, 40)
    mask = np.arange(25) < lengths[:, None]
    common = {"versions": 1, "trainer_version": 1}
    padded = observe(behavior_logprobs=BEHAVIOR, old_logprobs=OLD, mask=mask, **common)
    by_length = observe(behavior_logprobs=BEHAVIOR, old_logprobs=OLD, lengths=lengths, **common)
    flat = observe(behavior_logprobs=BEHAVIOR[mask], old_logprobs=OLD[mask], lengths=lengths, **common)
    ragged = observe(
        behavior_logprobs=[row[keep].tolist() for row, keep in zip(BEHAVIOR, mask, strict=True)],
        old_logprobs=[row[keep].tolist() for row, keep in zip(OLD, mask, strict=True)],
        **common,
    )
    assert padded == by_length == flat == ragged
    assert padded.tokens == lengths.sum()


def test_a_tensor_is_taken_without_its_framework():
    class Tensor:
        dtype = "torch.bfloat16"

        def __init__(self, values):
            self.values = values

        def detach(self):
            return self

        cpu = float = detach

        def __array__(self, dtype=None, copy=None):
            return self.values

    given = {"versions": 1, "trainer_version": 1}
    found = observe(behavior_logprobs=Tensor(BEHAVIOR), old_logprobs=Tensor(OLD), **given)
    assert found == observe(behavior_logprobs=BEHAVIOR, old_logprobs=OLD, **given)


@pytest.mark.parametrize(
    ("correction", "corrected"),
    [
        (truncated(1.05), lambda ratio: np.minimum(ratio, 1.05)),
        (masked(0.9, 1.1), lambda ratio: np.where((ratio >= 0.9) & (ratio <= 1.1), ratio, 0)),
    ],
)
def test_raw_and_corrected_ratios_stand_side_by_side(correction, corrected):
    found = (
        Monitor(correction=correction).observe(behavior_logprobs=BEHAVIOR, current_logprobs=CURRENT).ratios
    )
    raw = np.exp(CURRENT - BEHAVIOR)
    kept = corrected(raw)
    assert found.raw_mean == pytest.approx(raw.mean())
    assert (found.raw_min, found.raw_max) == pytest.approx((raw.min(), raw.max()))
    assert found.corrected_mean == pytest.approx(kept.mean())
    assert found.changed == pytest.approx(np.mean(kept != raw))
    assert found.raw_ess == pytest.approx(token_ess((CURRENT - BEHAVIOR).ravel()))


@pytest.mark.parametrize(
    "given",
    [
        {"old_logprobs": OLD[:, :-1]},
        {"old_logprobs": OLD, "mask": np.ones((40, 24))},
        {"old_logprobs": OLD, "lengths": [1, 2]},
        {"old_logprobs": OLD, "lengths": [26] * 40},
        {"old_logprobs": OLD, "versions": 1},
        {"old_logprobs": OLD, "groups": {"replica": [1, 2]}},
        {"old_logprobs": OLD, "rewards": [1.0] * 39},
        {"old_logprobs": OLD, "rewards": [1.0] * 41},
        {"old_logprobs": [["a"]]},
        {"old_logprobs": OLD, "step": True},
    ],
)
def test_what_does_not_fit_together_is_refused_and_counted(given):
    monitor = Monitor()
    with pytest.raises(InvalidValue):
        monitor.observe(behavior_logprobs=BEHAVIOR, **given)
    assert (monitor.remembered.refused, monitor.remembered.observed) == (1, 0)


def with_value(value, where=(3, 4)):
    changed = BEHAVIOR.copy()
    changed[where] = value
    return changed


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"behavior_logprobs": with_value(np.nan)}, Code.NOT_FINITE),
        ({"behavior_logprobs": with_value(-np.inf)}, Code.NOT_FINITE),
        ({"behavior_logprobs": with_value(-9999.0)}, Code.NOT_FINITE),
        ({"behavior_logprobs": with_value(0.7)}, Code.NOT_A_LOGPROB),
        ({"behavior_logprobs": with_value(-900.0)}, Code.IMPOSSIBLE_RATIO),
        ({"behavior_logprobs": [[-1.0, None], [-1.0, -2.0]], "old_logprobs": [[-1.0, -1.0]] * 2}, Code.MISSING_LOGPROBS),
        ({"behavior_logprobs": None}, Code.MISSING_LOGPROBS),
        ({"mask": np.zeros(SHAPE)}, Code.NOTHING_TO_JUDGE),
        ({"versions": 2}, Code.VERSION_UNKNOWN),
        ({"versions": -1}, Code.VERSION_UNKNOWN),
        ({"versions": [None] * 40}, Code.VERSION_UNKNOWN),
        ({"versions": np.where(np.arange(25) < 10, 1, 0) * np.ones((40, 1), int)}, Code.VERSION_BACKWARDS),
        ({"rewards": [math.nan] * 40}, Code.REWARD_NOT_FINITE),
    ],
)  # fmt: skip
def test_what_no_healthy_engine_reports_trips_at_once(given, code):
    monitor = Monitor()
    sound = {"behavior_logprobs": BEHAVIOR, "old_logprobs": RESCORED, "versions": 1, "trainer_version": 1}
    found = monitor.observe(**{**sound, **given})
    assert found.state is State.QUARANTINE
    assert code in {reason.code for reason in found.reasons}
    assert monitor.remembered.bad == 1
    assert monitor.remembered.warm_up.batches == 0


def test_padding_may_hold_anything():
    mask = np.ones(SHAPE, dtype=bool)
    mask[3, 4] = False
    found = observe(
        behavior_logprobs=with_value(np.nan), old_logprobs=RESCORED, mask=mask, versions=1, trainer_version=1
    )
    assert found.state is State.OK


def test_a_trainer_that_goes_back_trips_unless_it_says_so():
    given = {"behavior_logprobs": BEHAVIOR, "old_logprobs": RESCORED}
    monitor = Monitor()
    assert monitor.observe(**given, versions=7, trainer_version=7, step=10).train
    back = monitor.observe(**given, versions=6, trainer_version=6, step=11)
    assert [reason.code for reason in back.reasons if reason.bad] == [Code.VERSION_BACKWARDS]
    monitor.rewind(5, trainer_version=5)
    assert monitor.observe(**given, versions=6, trainer_version=6, step=6).train


def test_a_step_is_judged_once_and_in_order():
    monitor = Monitor()
    monitor.observe(behavior_logprobs=BEHAVIOR, step=4)
    for step in (4, 3):
        with pytest.raises(InvalidValue):
            monitor.observe(behavior_logprobs=BEHAVIOR, step=step)
    assert monitor.observe(behavior_logprobs=BEHAVIOR).step == 5


def test_real_tensors_of_any_type_are_taken():
    torch = pytest.importorskip("torch")
    behavior = torch.tensor(BEHAVIOR, dtype=torch.bfloat16)
    old = behavior.clone().requires_grad_()
    found = observe(
        behavior_logprobs=behavior,
        old_logprobs=old,
        mask=torch.ones(SHAPE, dtype=torch.bool),
        versions=torch.full(SHAPE, 3),
        trainer_version=3,
        rewards=torch.ones(SHAPE[0]),
        lengths=torch.full((SHAPE[0],), SHAPE[1]),
    )
    assert found.train
    assert (found.tokens, found.mismatch.max, found.lag_max) == (1000, 0.0, 0)

"""What looks healthy because nothing was compared: one array handed in twice, and padding that nobody masked."""

import numpy as np
import pytest
import torch

from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.baseline import of_canary
from zerodrift.monitor.decision import Code, Gap, State
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.rewards import BoundReward, Output, digest_of

RNG = np.random.default_rng(0)
ENGINE = -RNG.exponential(1.0, (64, 40)) - 0.3
TRAINER = ENGINE + RNG.normal(0, 0.01, ENGINE.shape)
AT = {"versions": 3, "trainer_version": 3}


def observe(monitor=None, **given):
    return (monitor or Monitor()).observe(**AT | given)


def codes(decision):
    return [reason.code for reason in decision.reasons]


TENSOR = torch.tensor(ENGINE, requires_grad=True)
ROWS = ENGINE.tolist()
NARROW = torch.tensor(ENGINE).bfloat16()


@pytest.mark.parametrize(
    ("engine", "trainer"),
    [
        (ENGINE, ENGINE),
        (ENGINE, ENGINE[:]),
        (TENSOR, TENSOR.detach()),
        (NARROW, NARROW.view(64, 40)),
        (ROWS, ROWS),
    ],
)
@pytest.mark.parametrize("name", ["old_logprobs", "current_logprobs", "rescored_logprobs"])
def test_one_array_handed_in_twice_was_compared_with_nothing(engine, trainer, name):
    found = observe(behavior_logprobs=engine, **{name: trainer})
    assert found.state is State.WARN
    assert codes(found) == [Code.NOT_OBSERVED]
    assert name in found.reasons[0].message
    assert not found.mismatch.observable


def test_nor_is_the_whole_ratio_seen_by_it():
    found = observe(behavior_logprobs=ENGINE, old_logprobs=TRAINER, current_logprobs=ENGINE)
    assert not found.total.observable
    assert found.mismatch.observable


def test_where_some_were_scored_again_those_alone_are_compared():
    scored = np.zeros(ENGINE.shape, dtype=bool)
    scored[:, :10] = True
    found = observe(
        behavior_logprobs=ENGINE, old_logprobs=ENGINE, rescored_logprobs=TRAINER, rescored_mask=scored
    )
    assert found.mismatch.tokens == scored.sum()


def test_the_newest_numbers_are_no_scores_under_older_weights():
    given = {"behavior_logprobs": ENGINE, "old_logprobs": TRAINER, "rescored_logprobs": TRAINER}
    assert observe(**given).state is State.OK
    stale = observe(**given | {"versions": 2})
    assert not stale.mismatch.observable
    assert not stale.staleness.observable
    assert stale.total.observable


def test_copies_are_asked_about_once():
    """An exact engine agrees to the last bit, and so does a trainer that took the engine's numbers for its own."""
    monitor = Monitor()
    found = [observe(monitor, behavior_logprobs=ENGINE, old_logprobs=ENGINE.copy()) for _ in range(3)]
    assert [each.state for each in found] == [State.WARN, State.OK, State.OK]
    [reason] = found[0].reasons
    assert (reason.code, reason.gap) == (Code.NOT_OBSERVED, Gap.MISMATCH)
    assert (
        observe(Monitor(precision="fp32"), behavior_logprobs=ENGINE, old_logprobs=ENGINE.copy()).state
        is State.OK
    )


def padded(at, width=20):
    """Both sides with zeros where no token is."""
    within = np.arange(40) < 40 - width if at == "end" else np.arange(40) >= width
    return {
        "behavior_logprobs": np.where(within, ENGINE, 0.0), "old_logprobs": np.where(within, TRAINER, 0.0),
        "mask": np.broadcast_to(within, ENGINE.shape),
    }  # fmt: skip


@pytest.mark.parametrize("at", ["end", "beginning"])
def test_zeros_that_both_sides_have_are_padding_that_nobody_masked(at):
    given = padded(at)
    assert observe(**given).reasons == ()
    del given["mask"]
    found = observe(**given)
    assert found.state is State.WARN
    [reason] = found.reasons
    assert (reason.code, reason.value) == (Code.PADDING, 64 * 20)


def test_so_is_a_row_of_nothing_else():
    """A rollout that failed, and was filled up."""
    given = {"behavior_logprobs": ENGINE.copy(), "old_logprobs": TRAINER.copy()}
    for values in given.values():
        values[:8] = 0.0
    [reason] = observe(**given).reasons
    assert (reason.code, reason.value) == (Code.PADDING, 8 * 40)


def test_a_token_that_is_certain_is_no_padding():
    given = padded("end", width=1)
    del given["mask"]
    assert observe(**given).state is State.OK


def test_nor_are_zeros_of_which_somebody_said_that_they_count():
    given = padded("end")
    assert observe(**given | {"mask": np.ones(ENGINE.shape)}).state is State.OK
    assert observe(**given | {"mask": None, "lengths": [40] * 64}).state is State.OK


def test_ranks_count_it_together():
    given = padded("end")
    del given["mask"]
    sent = []
    first = Monitor(gather=lambda mine: [sent.append(mine) or mine, mine])
    found = observe(first, **given)
    assert [reason.value for reason in found.reasons] == [2 * 64 * 20]


def test_an_estimate_of_exactly_nothing_is_asked_about_once():
    """A metric that nobody fills in is 0, and so is the gap to a trainer that took the engine's numbers."""
    monitor = Monitor()
    found = [monitor.log_step(step, 0.0) for step in range(3)]
    assert [each.state for each in found] == [State.WARN, State.OK, State.OK]
    assert codes(found[0]) == [Code.NOT_OBSERVED]
    assert monitor.remembered.bad == 0
    assert Monitor(precision="fp32").log_step(0, 0.0).state is State.OK


def test_an_estimate_above_the_gate_is_no_baseline():
    """As spread as such a warm-up, five times the healthy level would never have been found."""
    monitor = Monitor()
    for step in range(30):
        monitor.log_step(step, 0.2 if step in {3, 11} else 1e-4)
    later = [monitor.log_step(step, 5e-4).state for step in range(30, 60)]
    assert State.QUARANTINE in later


@pytest.mark.parametrize("trainer", [ENGINE, ENGINE[:], TRAINER.T])
def test_a_canary_of_one_array_or_of_other_tokens_is_none(trainer):
    with pytest.raises(InvalidValue):
        of_canary(ENGINE, trainer)
    assert of_canary(ENGINE, TRAINER).mean_abs > 0


@pytest.mark.parametrize("ids", ["abc", None, [1.5], [[1, 2], [3]], [True], 7, [2**64]])
def test_a_digest_is_of_whole_numbers(ids):
    """What is cut to a whole number has the digest of another output."""
    with pytest.raises(InvalidValue):
        digest_of(ids)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2], dtype=np.int32), torch.tensor([1, 2])])
def test_it_is_the_same_wherever_they_lie(ids):
    assert digest_of(ids) == digest_of([1, 2])
    assert digest_of([]) != digest_of([0])


@pytest.mark.parametrize("output", [("o", None), (None, "d"), (1, "d")])
def test_rewards_that_are_bound_to_nothing_in_particular_are_refused(output):
    with pytest.raises(InvalidValue, match="text"):
        observe(
            behavior_logprobs=ENGINE[:1], old_logprobs=TRAINER[:1], outputs=[Output(*output)],
            rewards=[BoundReward(*output, 1.0)],
        )  # fmt: skip

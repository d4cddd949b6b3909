"""What nobody could look at is named: a replica whose mismatch never shows while others' does, and weights left behind."""

import numpy as np
import pytest

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.monitor.baseline import WARM_UP
from zerodrift.monitor.decision import Code, Gap, State
from zerodrift.monitor.monitor import Monitor

ROWS, TOKENS = 32, 30
REPLICA = [str(place % 4) for place in range(ROWS)]
INTERVAL = 5


def batch(step, old=(), labels=REPLICA, nats=0.01, lag=2, **more):
    """Sequences of replicas in `old` were made by older weights."""
    rng = np.random.default_rng(step)
    behavior = -rng.exponential(1.0, (ROWS, TOKENS)) - 0.5
    trainer = np.minimum(behavior + rng.normal(0, nats, behavior.shape), 0)
    version = step + 10
    return {
        "behavior_logprobs": behavior,
        "old_logprobs": trainer,
        "versions": [version - lag * (label in old) for label in labels],
        "trainer_version": version,
        "groups": {"replica": labels},
        "step": step,
        **more,
    }


def told(monitor, steps, given, code=Code.NOT_OBSERVED):
    """(step, where) of every reason of this code."""
    found = []
    for step in steps:
        decision = monitor.observe(**given(step))
        assert decision.train
        found += [(step, reason.where) for reason in decision.reasons if reason.code is code]
    return found


@pytest.fixture
def monitor():
    return Monitor(MonitoringConfig(check_interval_steps=INTERVAL))


def test_a_replica_that_nobody_could_look_at_is_named_once(monitor):
    found = told(monitor, range(4 * INTERVAL), lambda step: batch(step, old="3"))
    assert found == [(INTERVAL - 1, "replica=3")]


def test_it_is_a_warning_with_what_would_show_it(monitor):
    decisions = [monitor.observe(**batch(step, old="3")) for step in range(INTERVAL)]
    (reason,) = decisions[-1].reasons
    assert decisions[-1].state is State.WARN
    assert (reason.gap, reason.value, reason.bad) == (Gap.MISMATCH, INTERVAL, False)
    assert "rescored_logprobs" in reason.message
    assert "step 0" in reason.message


def test_replicas_that_all_show_now_and_then_are_not_named(monitor):
    """Each is hidden for one batch less than it takes, again and again."""
    found = told(
        monitor,
        range(60),
        lambda step: batch(step, old=() if step % INTERVAL == 0 else "0123"[step % 2 :: 2]),
    )
    assert found == []


def test_it_is_named_again_after_it_was_seen(monitor):
    found = told(
        monitor, range(3 * INTERVAL), lambda step: batch(step, old="" if step == INTERVAL + 1 else "3")
    )
    assert found == [(INTERVAL - 1, "replica=3"), (2 * INTERVAL + 1, "replica=3")]


@pytest.mark.parametrize(("fresh", "named"), [(1, True), (2, True), (3, False), (30, False)])
def test_a_handful_of_tokens_shows_nobody(monitor, fresh, named):
    """Of a replica's 240 tokens 1 % are 2.4; the rest is of older weights, and 0.2 nats off."""

    def given(step):
        each = batch(step, old="3")
        each["versions"] = np.repeat(np.array(each["versions"])[:, None], TOKENS, axis=1)
        each["versions"][3, TOKENS - fresh :] = each["trainer_version"]
        hidden = each["versions"] < each["trainer_version"]
        each["behavior_logprobs"][hidden] -= 0.2
        return each

    found = told(monitor, range(2 * INTERVAL), given)
    assert found == ([(INTERVAL - 1, "replica=3")] if named else [])


def test_of_a_whole_batch_it_does_not_either(monitor):
    def given(step):
        each = batch(step, old="" if step < INTERVAL else "0123")
        each["versions"] = np.repeat(np.array(each["versions"])[:, None], TOKENS, axis=1)
        each["versions"][:4, -1] = each["trainer_version"]
        return each

    found = told(monitor, range(3 * INTERVAL), given)
    assert found[0] == (2 * INTERVAL, "")
    decision = monitor.observe(**given(3 * INTERVAL))
    assert "4 of 960 tokens" in decision.reasons[0].message


def test_a_sample_that_was_scored_again_shows_it(monitor):
    def given(step):
        each = batch(step, old="3")
        one = np.zeros(ROWS, dtype=bool)
        one[3] = True
        return {**each, "rescored_logprobs": each["old_logprobs"], "rescored_mask": one}

    assert told(monitor, range(3 * INTERVAL), given) == []


def test_a_replica_that_is_gone_is_not_waited_for(monitor):
    rest = [label if label != "3" else "0" for label in REPLICA]
    given = lambda step: batch(step, old="3", labels=REPLICA if step < INTERVAL - 1 else rest)  # noqa: E731
    assert told(monitor, range(3 * INTERVAL), given) == []


def test_one_that_comes_late_is_given_as_long(monitor):
    rest = [label if label != "3" else "0" for label in REPLICA]
    given = lambda step: batch(step, old="3", labels=rest if step < 20 else REPLICA)  # noqa: E731
    assert told(monitor, range(40), given) == [(20 + INTERVAL - 1, "replica=3")]


def test_where_nothing_shows_it_is_said_of_the_whole_and_later_of_the_rest(monitor):
    """No engine is judged: that is one thing to say. Once others show, the one that still does not is named."""
    found = told(monitor, range(2 * INTERVAL), lambda step: batch(step, old="0123"))
    assert {where for _, where in found} == {""}
    found = told(monitor, range(2 * INTERVAL, 2 * INTERVAL + 3), lambda step: batch(step, old="3"))
    assert found == [(2 * INTERVAL, "replica=3")]


def test_a_batch_that_trips_counts_for_neither(monitor):
    for step in range(INTERVAL - 1):
        monitor.observe(**batch(step, old="3"))
    broken = batch(INTERVAL, old="3")
    broken["behavior_logprobs"][0, 0] = np.nan
    assert {reason.code for reason in monitor.observe(**broken).reasons} == {Code.NOT_FINITE}
    found = monitor.observe(**batch(INTERVAL + 1, old="3"))
    assert "replica=3" in {reason.where for reason in found.reasons}


def test_it_survives_a_restart(tmp_path):
    config, path = MonitoringConfig(check_interval_steps=INTERVAL), tmp_path / "monitor.json"
    found = []
    for step in range(3 * INTERVAL):
        found += told(Monitor(config, path=path), [step], lambda each: batch(each, old="3"))
    assert found == [(INTERVAL - 1, "replica=3")]


def test_labels_that_nobody_could_look_at_make_room_too(monitor):
    labels = [[f"{step}-{place}" for place in range(8)] * 4 for step in range(9)]
    for step in range(9):
        monitor.observe(**batch(step, old=labels[step], labels=labels[step]))
    hidden = {*monitor.remembered.sight.hidden}
    assert hidden == {f"replica={step}-{place}" for step in range(1, 9) for place in range(8)}


def test_a_replica_in_doubt_that_is_hidden_does_not_close_the_breaker(monitor):
    """It was quarantined, and its tokens are all of older weights since: batches of the others say nothing of it."""
    for step in range(WARM_UP + 2):
        assert monitor.observe(**batch(step)).state is State.OK
    step = WARM_UP + 2
    while monitor.observe(**_off(batch(step))).train:
        step += 1
        assert step < 60
    after = [monitor.observe(**batch(step + n, old="3")) for n in range(1, 6)]
    assert {each.state for each in after} == {State.WARN}
    seen = [monitor.observe(**batch(step + n)).state for n in range(6, 12)]
    assert seen[-1] is State.OK


def _off(given):
    off = given["old_logprobs"].copy()
    off[3::4] -= 0.006
    return {**given, "old_logprobs": off}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [(1, [(WARM_UP + INTERVAL - 1, "")]), (3, [(WARM_UP + INTERVAL - 1, "")]), (4, [])],
)
def test_prompts_too_few_to_know_a_spread_from_are_said_once(monitor, prompts, expected):
    """Nothing but gates would be judged for a whole training, and every batch would read OK."""
    groups = {"prompt": [place % prompts for place in range(ROWS)]}
    assert told(monitor, range(WARM_UP + 4 * INTERVAL), lambda step: batch(step, groups=groups)) == expected


# --- weights that are old, and labelled so ------------------------------------------------------------------------


def stuck(step, since=3, replicas="0123"):
    """From a step on those replicas stay at its weights, as they say; all is scored again under its own weights."""
    given = batch(step)
    old = [min(step, since) if label in replicas else step for label in REPLICA]
    return {
        **given,
        "versions": [10 + version for version in old],
        "rescored_logprobs": given["old_logprobs"],
    }


def test_an_engine_that_takes_no_new_weights_is_named_without_a_max_lag(monitor):
    found = told(monitor, range(40), stuck, code=Code.LAG)
    assert found == [(3 + INTERVAL, ""), (3 + 2 * INTERVAL, ""), (3 + 4 * INTERVAL, "")]


def test_so_is_one_replica(monitor):
    found = told(monitor, range(15), lambda step: stuck(step, replicas="3"), code=Code.LAG)
    assert found == [(3 + INTERVAL, "replica=3"), (3 + 2 * INTERVAL, "replica=3")]


def test_it_says_how_old_and_what_would_keep_it_back(monitor):
    *_, last = (monitor.observe(**stuck(step)) for step in range(3 + INTERVAL + 1))
    reason = next(reason for reason in last.reasons if reason.code is Code.LAG)
    assert (last.state, reason.gap, reason.value, reason.bad) == (State.WARN, Gap.STALENESS, INTERVAL, False)
    assert "max_lag" in reason.message


@pytest.mark.parametrize("every", [1, INTERVAL])
def test_weights_that_move_on_now_and_then_are_no_news(monitor, every):
    """And a sample or two that began long ago."""

    def given(step):
        version = 10 + step - step % every
        each = batch(step, versions=[max(0, version - 9 * (place < 2)) for place in range(ROWS)])
        return {**each, "rescored_logprobs": each["old_logprobs"]}

    assert told(monitor, range(40), given, code=Code.LAG) == []


def test_a_max_lag_says_it_itself():
    monitor = Monitor(MonitoringConfig(check_interval_steps=INTERVAL, max_lag=12))
    found = []
    for step in range(18):
        found += [reason for reason in monitor.observe(**stuck(step)).reasons if reason.code is Code.LAG]
    assert [reason.bad for reason in found] == [True, True]

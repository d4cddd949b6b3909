"""Ranks that exchange bytes: all decide alike, or all raise alike, and none waits for one that raised."""

import multiprocessing
import threading

import numpy as np
import pytest

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.core.errors import InvalidValue, RanksDisagree
from zerodrift.monitor.baseline import WARM_UP
from zerodrift.monitor.decision import Code, State
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.rewards import BoundReward

PATIENCE_S = 20


def batch(seed=0, nats=0.01, rows=16, **more):
    rng = np.random.default_rng(seed)
    behavior = -rng.exponential(1.0, (rows, 40)) - 0.5
    old = np.minimum(behavior + rng.normal(0, nats, behavior.shape), 0)
    return {"behavior_logprobs": behavior, "old_logprobs": old, "versions": 0, "trainer_version": 0, **more}


class Exchange:
    """What a collective does: nobody goes on before everybody has come."""

    def __init__(self, ranks):
        self._barrier, self._parts = threading.Barrier(ranks, timeout=PATIENCE_S), [b""] * ranks

    def of(self, rank):
        def gather(mine):
            self._parts[rank] = mine
            self._barrier.wait()
            parts = list(self._parts)
            self._barrier.wait()
            return parts

        return gather


def monitors(ranks=2, **settings):
    exchange = Exchange(ranks)
    return [Monitor(gather=exchange.of(rank), **settings) for rank in range(ranks)]


def at_once(*calls):
    """What each returned or raised; a rank that waits for another that never comes is a broken barrier."""
    found = [None] * len(calls)

    def one(place):
        try:
            found[place] = calls[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def observed(ranks, *given):
    return at_once(
        *(lambda rank=rank, each=each: rank.observe(**each) for rank, each in zip(ranks, given, strict=True))
    )


def states(ranks):
    return [rank.remembered for rank in ranks]


def test_ranks_that_agree_decide_alike():
    ranks = monitors(3)
    for step in range(WARM_UP + 2):
        found = observed(ranks, *(batch(100 * step + rank, step=step) for rank in range(3)))
        assert {each.state for each in found} == {State.OK}
        assert {each.tokens for each in found} == {3 * 16 * 40}
    assert states(ranks)[0] == states(ranks)[1] == states(ranks)[2]
    assert ranks[0].remembered.baseline is not None


def split(given, ranks):
    for rank in range(ranks):
        yield {
            name: value[rank::ranks] if isinstance(value, np.ndarray) else value
            for name, value in given.items()
        }


def test_ranks_decide_by_the_same_sums_as_one():
    rewards = np.random.default_rng(4).random(16)
    given = [batch(step, rewards=rewards) for step in range(WARM_UP)] + [batch(99, nats=0.03)]
    alone, ranks = Monitor(), monitors()
    for each in given:
        whole, (one, other) = alone.observe(**each), observed(ranks, *split(each, 2))
    assert one.state is other.state is whole.state is State.QUARANTINE
    assert one.tokens == whole.tokens
    assert one.mismatch.k3 == pytest.approx(whole.mismatch.k3)
    assert one.mismatch.token_ess == pytest.approx(whole.mismatch.token_ess)
    assert [reason.code for reason in one.reasons] == [reason.code for reason in whole.reasons]


def test_one_rank_with_a_nan_quarantines_all():
    broken = batch(1)
    broken["behavior_logprobs"][0, 0] = np.nan
    found = observed(monitors(), batch(), broken)
    assert [(each.state, each.reasons[0].code) for each in found] == [(State.QUARANTINE, Code.NOT_FINITE)] * 2


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"step": 3}, {"step": 4}, ("step", "3", "4")),
        ({"trainer_version": 5}, {"trainer_version": 6}, ("trainer_version", "5", "6")),
    ],
)
def test_ranks_that_disagree_raise_on_all_of_them_and_none_has_judged(one, other, named):
    ranks = monitors()
    found = observed(ranks, batch(**one), batch(1, **other))
    assert [type(each) for each in found] == [RanksDisagree] * 2
    assert all(word in str(each) for each in found for word in named)
    assert [state.observed for state in states(ranks)] == [0, 0]
    assert [state.refused for state in states(ranks)] == [1, 1]
    assert {each.state for each in observed(ranks, batch(), batch(1))} == {State.OK}


@pytest.mark.parametrize(
    "broken",
    [
        {"old_logprobs": np.zeros((3, 3))},
        {"step": -1},
        {"groups": {"replica": ["a"]}},
        {"reference_kl": "much"},
        {"rewards": [1.0]},
        {"groups": {"replica": ["\ud800"] * 16}},
        {"rewards": [BoundReward("\ud800", "x", 1.0)] * 16, "outputs": []},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_a_rank_that_cannot_read_its_batch_leaves_no_other_waiting(broken):
    ranks = monitors()
    mine, other = observed(ranks, batch(), {**batch(1), **broken})
    assert isinstance(mine, RanksDisagree)
    assert "rank 1" in str(mine)
    assert isinstance(other, InvalidValue)
    assert str(other) in str(mine)
    assert [state.observed for state in states(ranks)] == [0, 0]


def test_a_rank_whose_own_correction_raises_leaves_no_other_waiting():
    def broken(ratios):
        raise RuntimeError("mine")

    exchange = Exchange(2)
    ranks = [Monitor(gather=exchange.of(0)), Monitor(gather=exchange.of(1), correction=broken)]
    mine, other = observed(ranks, batch(), batch(1))
    assert (type(mine), type(other)) == (RanksDisagree, RuntimeError)
    assert states(ranks)[0] == states(ranks)[1]


def test_a_closed_rank_leaves_no_other_waiting():
    ranks = monitors()
    ranks[1].close()
    mine, other = observed(ranks, batch(), batch(1))
    assert "closed" in str(mine)
    assert "closed" in str(other)


def test_a_rank_that_does_not_know_the_version_takes_that_of_the_others():
    ranks = monitors()
    blind = {name: value for name, value in batch(1).items() if "version" not in name}
    found, _ = observed(ranks, batch(versions=1, trainer_version=3), blind)
    assert found.train
    assert found.lag_mean == 2.0  # of the tokens that have a version
    assert [state.trainer_version for state in states(ranks)] == [3, 3]
    found = observed(
        ranks, batch(step=1, trainer_version=3), batch(1, step=1, versions=None, trainer_version=3)
    )
    assert [each.state for each in found] == [State.OK, State.OK]


EMPTY = ({"behavior_logprobs": [], "old_logprobs": []}, {"mask": np.zeros((16, 40))})


@pytest.mark.parametrize("empty", EMPTY, ids=["no sequences", "no token is left"])
def test_a_rank_that_got_nothing_spoils_no_batch(empty):
    ranks = monitors()
    found = observed(ranks, batch(), {**batch(1), **empty})
    assert [each.state for each in found] == [State.OK] * 2
    assert {each.tokens for each in found} == {16 * 40}


@pytest.mark.parametrize("empty", EMPTY, ids=["no sequences", "no token is left"])
def test_ranks_that_all_got_nothing_trip(empty):
    found = observed(monitors(), {**batch(), **empty}, {**batch(1), **empty})
    assert [[reason.code for reason in each.reasons] for each in found] == [[Code.NOTHING_TO_JUDGE]] * 2


def test_ranks_with_other_settings_raise():
    exchange = Exchange(2)
    ranks = [
        Monitor(MonitoringConfig(least_ess=least), gather=exchange.of(rank))
        for rank, least in enumerate((0.3, 0.4))
    ]
    found = observed(ranks, batch(), batch(1))
    assert [type(each) for each in found] == [RanksDisagree] * 2
    assert "settings" in str(found[0])


def test_a_state_that_one_rank_kept_is_everybodys_after_a_restart(tmp_path):
    """As a script does that gives the first rank alone a path: the others began anew, and decided otherwise."""
    paths = [tmp_path / "monitor.json", None]
    exchange = Exchange(2)
    ranks = [Monitor(path=path, gather=exchange.of(rank)) for rank, path in enumerate(paths)]
    for step in range(WARM_UP + 1):
        observed(ranks, batch(2 * step), batch(2 * step + 1))
    again = [Monitor(path=path, gather=exchange.of(rank)) for rank, path in enumerate(paths)]
    assert again[1].remembered.baseline is None
    found = observed(again, batch(50), batch(51))
    assert [each.step for each in found] == [WARM_UP + 1] * 2
    assert states(again)[0] == states(again)[1]
    assert states(again)[1].baseline == states(ranks)[0].baseline


@pytest.mark.parametrize("halted", [0, 1])
def test_a_halt_of_one_rank_is_a_halt_of_all(halted):
    ranks = monitors()
    observed(ranks, batch(), batch(1))
    for _ in range(3):
        ranks[halted].trigger_alert()
    found = observed(ranks, batch(2), batch(3))
    assert [each.state for each in found] == [State.HALT] * 2
    ranks[halted].half_open()
    assert {each.state for each in observed(ranks, batch(4), batch(5))} == {State.HALT}
    for rank in ranks:
        rank.half_open()
    assert {each.state for each in observed(ranks, batch(6), batch(7))} == {State.WARN}


def test_a_gather_that_gives_each_its_own_first_is_found_before_ranks_part():
    exchange = Exchange(2)

    def own_first(rank):
        gather = exchange.of(rank)
        return lambda mine: sorted(gather(mine), key=lambda part: part != mine)

    ranks = [Monitor(gather=own_first(rank)) for rank in range(2)]
    observed(ranks, batch(), batch(1))
    ranks[0].rewind(-1)
    found = observed(ranks, batch(2, step=1), batch(3, step=1))
    assert [type(each) for each in found] == [RanksDisagree] * 2


def test_labels_of_all_ranks_together_are_counted():
    ranks = monitors()
    labels = [{"task": [f"{rank}-{place}" for place in range(40)]} for rank in range(2)]
    found = observed(ranks, *(batch(rank, rows=40, groups=labels[rank]) for rank in range(2)))
    assert [type(each) for each in found] == [InvalidValue] * 2
    assert "80" in str(found[0])


@pytest.mark.parametrize(
    "gather",
    [lambda mine: [], lambda mine: [b"of somebody else"], lambda mine: [mine, b"{}"], lambda mine: 7],
)
def test_a_gather_that_does_not_bring_everybodys_bytes_is_refused(gather):
    monitor = Monitor(gather=gather)
    with pytest.raises(RanksDisagree):
        monitor.observe(**batch())
    assert monitor.remembered.observed == 0


def test_any_kind_of_bytes_will_do():
    assert Monitor(gather=lambda mine: (bytearray(each) for each in (mine, mine))).observe(**batch()).train


def _process(connection, rank, given):
    def gather(mine):
        connection.send_bytes(mine)
        return [connection.recv_bytes() for _ in range(2)]

    monitor = Monitor(gather=gather)
    for each in given:
        try:
            answer = str(monitor.observe(**each).state)
        except Exception as error:
            answer = type(error).__name__
        connection.send_bytes(b"=" + answer.encode())


def test_processes_of_their_own_raise_alike_and_go_on():
    """Two processes and real pipes; whoever waits for one that raised is found by the time limit."""
    fork = multiprocessing.get_context("fork")
    given = [
        [batch(0, step=0), batch(2, step=1), batch(4, step=2), {**batch(), "old_logprobs": [1]}, batch(6, step=3)],
        [batch(1, step=0), batch(3, step=2), batch(5, step=2, trainer_version=1), batch(step=3), batch(7, step=3)],
    ]  # fmt: skip
    ends = [fork.Pipe() for _ in given]
    processes = [
        fork.Process(target=_process, args=(ends[rank][1], rank, given[rank]), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    answers = [[], []]
    while min(map(len, answers)) < len(given[0]):
        parts = []
        for rank, (mine, _) in enumerate(ends):
            assert mine.poll(PATIENCE_S), f"rank {rank} waits for another"
            part = mine.recv_bytes()
            if part.startswith(b"="):
                answers[rank].append(part[1:].decode())
            else:
                parts.append(part)
        for mine, _ in ends if parts else ():
            for part in parts:
                mine.send_bytes(part)
    for process in processes:
        process.join(PATIENCE_S)
    assert answers == [
        ["OK", "RanksDisagree", "RanksDisagree", "InvalidValue", "OK"],
        ["OK", "RanksDisagree", "RanksDisagree", "RanksDisagree", "OK"],
    ]

"""What an archive would refuse is refused before anything is decided; and what trips, trips, archived or not."""

import os
import shutil

import numpy as np
import pytest

from zerodrift.core.errors import ArchiveLocked, InvalidValue, RecordError
from zerodrift.monitor.decision import Code, State
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.rewards import BoundReward, Output
from zerodrift.records.archive.reader import ArchiveReader

ROWS, TOKENS = 16, 50
IDS = {"prompt_ids": [[1, 2, 3]] * ROWS, "completion_ids": [[5] * TOKENS] * ROWS}


def batch(nats=0.01, **more):
    rng = np.random.default_rng(0)
    behavior = -rng.exponential(1.0, (ROWS, TOKENS)) - 0.5
    old = np.minimum(behavior + rng.normal(0, nats, behavior.shape), 0)
    given = {"behavior_logprobs": behavior, "old_logprobs": old, "versions": 3, "trainer_version": 3}
    return given | IDS | more


class Kept:
    def __init__(self):
        self.batches = []

    def append(self, batch):
        self.batches.append(batch)


def observe(**more):
    archive = Kept()
    return Monitor(archive=archive).observe(**batch(**more)), archive.batches


def codes(decision):
    return [reason.code for reason in decision.reasons]


def test_labels_may_be_numbers_also_of_a_bad_batch(tmp_path):
    groups = {"replica": [place % 4 for place in range(ROWS)], "environment": [None] * ROWS}
    for labels in (groups, {"replica": np.arange(ROWS), "prompt": tuple(range(ROWS))}):
        decision, (kept,) = observe(nats=0.5, groups=labels)
        assert decision.state is State.QUARANTINE
        assert Code.NOT_ARCHIVED not in codes(decision)
        assert [rollout.replica for rollout in kept.rollouts] == [str(each) for each in labels["replica"]]
    monitor = Monitor(directory=tmp_path)
    monitor.observe(**batch(nats=0.5, groups=groups))
    monitor.close()
    assert len(list(ArchiveReader(tmp_path / "archive").entries())) == 1


@pytest.mark.parametrize("nats", [0.01, 0.5])
@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_ids": [[1]] * (ROWS - 1)},
        {"prompt_ids": [[-100, 1]] * ROWS},
        {"prompt_ids": ["text"] * ROWS},
        {"prompt_ids": [[1.5]] * ROWS},
        {"prompt_ids": [[2**31]] * ROWS},
        {"completion_ids": [[5] * (TOKENS - 1)] * ROWS},
        {"completion_ids": [[5] * TOKENS] * (ROWS - 1)},
        {"completion_ids": [5] * (TOKENS * ROWS)},
        {"completion_ids": [[-1] * TOKENS] * ROWS},
        {"completion_ids": np.full((ROWS, TOKENS), 5.0)},
        {"completion_ids": 5},
        {"sampling": {}},
        {"reference_kl": "x"},
        {"groups": [1, 2]},
        {"groups": {"replica": 3}},
        {"reference_kl": 10**400},
        {"rewards": ["a"] * ROWS},
        {"rewards": [10**400] * ROWS},
        {"rewards": [1.0] * ROWS, "outputs": [Output("0", "x")] * ROWS},
        {"rewards": [BoundReward("0", "x", 1.0)] + [1.0] * (ROWS - 1), "outputs": [Output("0", "x")] * ROWS},
        {"rewards": [BoundReward("0", "x", 1.0)] * ROWS, "outputs": list(range(ROWS))},
    ],
    ids=lambda wrong: next(iter(wrong)) if isinstance(wrong, dict) else str(wrong),
)
def test_what_does_not_fit_is_refused_healthy_or_not(nats, wrong):
    monitor = Monitor(archive=Kept())
    with pytest.raises(InvalidValue):
        monitor.observe(**batch(nats, **wrong))
    assert (monitor.remembered.step, monitor.remembered.refused) == (None, 1)


@pytest.mark.parametrize(
    "fits",
    [
        {"completion_ids": np.full((ROWS, TOKENS), 5)},
        {"completion_ids": np.full(ROWS * 30, 5), "lengths": [30] * ROWS, "flat": True},
        {"completion_ids": [[5] * 30 + [-100] * 20] * ROWS, "lengths": [30] * ROWS},
        {
            "completion_ids": [[5] * 30 + [-100] * 20] * ROWS,
            "mask": np.arange(TOKENS)[None].repeat(ROWS, 0) < 30,
        },
        {"prompt_ids": [[]] * ROWS},
        {"prompt_ids": [[1] * (1 + place) for place in range(ROWS)]},
        {"versions": np.int64(3)},
    ],
    ids=lambda fits: next(iter(fits)),
)
def test_what_fits_is_kept(fits):
    given = batch(0.5, **fits)
    if given.pop("flat", False):
        for name in ("behavior_logprobs", "old_logprobs"):
            given[name] = given[name][:, :30].ravel()
    archive = Kept()
    decision = Monitor(archive=archive).observe(**given)
    assert Code.NOT_ARCHIVED not in codes(decision)
    assert len(archive.batches) == 1


@pytest.mark.parametrize(
    "versions", [3.0, float("nan"), {}, "a", [3.5] * ROWS, [None] * ROWS, 4, True, -(2**63)]
)
def test_versions_that_nobody_can_place_trip(versions):
    decision, batches = observe(versions=versions)
    assert decision.state is State.QUARANTINE
    assert Code.VERSION_UNKNOWN in codes(decision)
    assert len(batches) == 1


def test_two_rewards_of_one_output_trip_and_the_batch_is_kept_without_their_names():
    decision, (kept,) = observe(
        rewards=[BoundReward("0", "x", 1.0)] * ROWS, outputs=[Output("0", "x")] * ROWS
    )
    assert codes(decision) == [Code.REWARD_MISBOUND, Code.NOT_ARCHIVED]
    assert not decision.reasons[-1].bad
    assert "outputs" in decision.reasons[-1].message
    assert [rollout.id for rollout in kept.rollouts] == [str(place) for place in range(ROWS)]


@pytest.mark.parametrize("value", [np.int64(3), np.array(3), np.uint8(3)])
def test_a_whole_number_of_any_kind_is_a_version_and_a_step(tmp_path, value):
    monitor = Monitor(directory=tmp_path)
    monitor.observe(**batch(trainer_version=value), step=value)
    assert [type(each) for each in (monitor.remembered.step, monitor.remembered.trainer_version)] == [
        int,
        int,
    ]
    monitor.rewind(value, value)
    monitor.close()
    assert Monitor(path=tmp_path / "monitor.json").remembered.trainer_version == 3


@pytest.mark.parametrize(
    "value", [3.0, 3.5, "3", True, np.bool_(True), -2, float("nan"), [3], np.array([3]), 10**30]
)
def test_anything_else_is_refused(value):
    monitor = Monitor()
    given = batch()
    del given["versions"]
    with pytest.raises(InvalidValue):
        monitor.observe(**{**given, "trainer_version": value})
    with pytest.raises(InvalidValue):
        monitor.observe(**given, step=value)
    with pytest.raises(InvalidValue):
        monitor.rewind(value)
    with pytest.raises(InvalidValue):
        monitor.rewind(1, value)
    assert (monitor.remembered.step, monitor.remembered.trainer_version) == (None, None)


def test_a_rewind_hides_no_engine_that_nobody_sees():
    monitor = Monitor()
    monitor.observe(**batch(), step=1000)
    monitor.rewind(10, 3)
    unseen = batch(versions=2)
    found = [monitor.observe(**unseen) for _ in range(110)]
    assert any(Code.NOT_OBSERVED in codes(decision) for decision in found)


GIVEN = batch()
BEHAVIOR, OLD = GIVEN["behavior_logprobs"], GIVEN["old_logprobs"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"behavior_logprobs": BEHAVIOR + 0j},
        {"behavior_logprobs": BEHAVIOR < -1},
        {"behavior_logprobs": BEHAVIOR.astype(str)},
        {"behavior_logprobs": np.zeros((ROWS, TOKENS), dtype="M8[s]")},
        {"behavior_logprobs": np.ma.masked_array(BEHAVIOR, mask=BEHAVIOR < -3)},
        {"mask": np.full((ROWS, TOKENS), np.nan)},
        {"mask": np.full((ROWS, TOKENS), -100)},
        {"mask": np.full((ROWS, TOKENS), 0.5)},
        {"mask": np.full((ROWS, TOKENS), "no")},
        {"rescored_logprobs": OLD, "rescored_mask": ["no"] * ROWS},
        {"rescored_logprobs": OLD, "rescored_mask": np.full(ROWS, np.nan)},
        {"groups": {"replica=a": [1] * ROWS}},
        {"groups": {"": [1] * ROWS}},
        {"groups": {"replica": ["\ud800"] * ROWS}},
        {"groups": {"replica": ["x" * 300] * ROWS}},
    ],
    ids=lambda wrong: next(iter(reversed(wrong))),
)
def test_what_numpy_would_read_as_something_else_is_refused(wrong):
    monitor = Monitor()
    with pytest.raises(InvalidValue):
        monitor.observe(**batch(**wrong))
    assert monitor.remembered.step is None


@pytest.mark.parametrize(
    "mask", [np.ones((ROWS, TOKENS)), np.ones((ROWS, TOKENS), dtype=np.int8), [[True] * TOKENS] * ROWS]
)
def test_a_mask_of_any_type_that_says_yes_or_no_will_do(mask):
    assert Monitor().observe(**batch(mask=mask)).tokens == ROWS * TOKENS


@pytest.mark.parametrize(
    "nothing", [{}, {"versions": [], "groups": {"replica": []}, "rewards": []}], ids=["bare", "all"]
)
def test_a_batch_of_nothing_is_nothing_to_judge(nothing):
    found = Monitor().observe(behavior_logprobs=[], old_logprobs=[], trainer_version=3, **nothing)
    assert codes(found) == [Code.NOTHING_TO_JUDGE]
    assert not found.train


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": {"least_ess": 0.2}},
        {"actions": {"quarantine": print}},
        {"archive": object()},
        {"gather": 3},
        {"correction": 3},
        {"baseline": 3},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_would_fail_at_the_first_bad_batch_is_refused_at_once(wrong):
    with pytest.raises(InvalidValue):
        Monitor(**wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda monitor: monitor.retake([["a"] * 3000], [["b"] * 3000]),
        lambda monitor: monitor.retake(np.full(3000, 1.0), np.full(3000, 1.0)),
        lambda monitor: monitor.compare_rewards(["a"] * 30, [1.0] * 30),
        lambda monitor: monitor.restore({}),
    ],
)
def test_so_is_what_the_other_calls_cannot_read(call):
    with pytest.raises(InvalidValue):
        call(Monitor())


def test_a_canary_may_be_ragged():
    rows = [[-1.0] * 1000, [-1.0] * 1500]
    assert Monitor().retake(rows, [[*row] for row in rows]).source == "canary"


def test_a_correction_that_clips_in_place_hides_nothing():
    def clipped(ratios):
        return np.minimum(ratios, 1.0, out=ratios)

    found = Monitor(correction=clipped).observe(**batch()).ratios
    assert found.raw_max > 1.0
    assert found.corrected_max == 1.0
    assert found.changed > 0.3


def test_of_two_monitors_on_one_path_the_second_to_write_is_refused(tmp_path):
    """It would have written OK over a halt."""
    first, second = (Monitor(path=tmp_path / "state.json") for _ in range(2))
    for _ in range(3):
        first.observe(**batch(0.5))
    with pytest.raises(ArchiveLocked):
        second.observe(**batch())
    assert Monitor(path=tmp_path / "state.json").state is State.HALT
    assert first.observe(**batch()).state is State.HALT


def test_a_state_that_was_removed_is_written_again(tmp_path):
    monitor = Monitor(path=tmp_path / "state.json")
    monitor.observe(**batch())
    (tmp_path / "state.json").unlink()
    monitor.observe(**batch())
    assert Monitor(path=tmp_path / "state.json").remembered.step == 1


@pytest.mark.parametrize("place", ["/proc/self/nowhere", "/proc/self/nowhere/below"])
def test_a_directory_that_cannot_be_made_is_named(place):
    with pytest.raises(RecordError, match="nowhere"):
        Monitor(directory=place)


def test_a_state_that_a_backup_put_back_is_ours_still(tmp_path):
    monitor = Monitor(path=tmp_path / "state.json")
    monitor.observe(**batch())
    (tmp_path / "copy.json").write_bytes((tmp_path / "state.json").read_bytes())
    (tmp_path / "copy.json").replace(tmp_path / "state.json")
    assert monitor.observe(**batch()).step == 1


def test_a_fork_writes_nothing_beside_the_monitor_that_it_was(tmp_path):
    monitor = Monitor(path=tmp_path / "state.json")
    monitor.observe(**batch())
    child = os.fork()
    if not child:
        try:
            monitor.observe(**batch(0.5))
        except RecordError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert monitor.observe(**batch()).state is State.OK


def test_an_archive_that_is_gone_is_named(tmp_path):
    monitor = Monitor(archive=tmp_path / "archive", healthy_every=1)
    monitor.observe(**batch())
    shutil.rmtree(tmp_path / "archive")
    with pytest.raises(RecordError, match="cannot be written"):
        monitor.observe(**batch())
    with pytest.raises(RecordError, match="cannot be written"):
        monitor.close()


RAGGED = [[-1.0], [-1.0, -2.0]]


@pytest.mark.parametrize(
    "given",
    [
        {"behavior_logprobs": RAGGED, "mask": iter([1, 1])},
        {"behavior_logprobs": RAGGED, "mask": [1, 1]},
        {"behavior_logprobs": RAGGED, "mask": [object()]},
        {"behavior_logprobs": (row for row in RAGGED)},
        {"behavior_logprobs": -1.0},
        {"behavior_logprobs": np.array(-1.0)},
        {"behavior_logprobs": np.array(None)},
    ],
)
def test_what_is_no_row_of_numbers_is_refused_by_name(given):
    with pytest.raises(InvalidValue):
        Monitor().observe(**given, old_logprobs=RAGGED)
    with pytest.raises(InvalidValue):
        Monitor().observe(**given)


def test_a_tensor_of_64_bits_keeps_them():
    behavior = pytest.importorskip("torch").tensor(batch()["behavior_logprobs"])
    found = Monitor().observe(
        behavior_logprobs=behavior, old_logprobs=behavior - 1e-12, versions=3, trainer_version=3
    )
    assert found.mismatch.mean_abs == pytest.approx(1e-12, rel=1e-2, abs=0)


@pytest.mark.parametrize("reward", [1e308, -1e200, float("inf"), float("nan")])
def test_rewards_that_no_state_could_hold_trip(tmp_path, reward):
    groups = {"prompt": [place // 8 for place in range(ROWS)]}
    monitor = Monitor(path=tmp_path / "monitor.json")
    found = monitor.observe(**batch(), rewards=[reward] * ROWS, groups=groups)
    assert [reason.code for reason in found.reasons if reason.bad] == [Code.REWARD_NOT_FINITE]


def test_places_that_cannot_be_written_are_refused_at_once_and_a_missing_folder_is_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecordError):
        Monitor(archive=tmp_path / "file" / "archive")
    with pytest.raises(RecordError):
        Monitor(path=tmp_path / "file" / "monitor.json")
    monitor = Monitor(path=tmp_path / "new" / "monitor.json")
    assert monitor.log_step(0, 1e-4).train
    assert (tmp_path / "new" / "monitor.json").is_file()

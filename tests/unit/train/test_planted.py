"""A fault that is planted in a training at a step acts from there on, and a replay without it parts there and not before."""

import msgspec
import pytest
from tests.unit.train.conftest import small
from tests.unit.train.test_loop import digests

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import BitsDiffer, CapabilityMissing, ConfigError, InvalidValue
from zerodrift.core.version import WeightVersion
from zerodrift.faults.registry import FAULTS
from zerodrift.faults.wrapper import innermost
from zerodrift.train.again import done_again
from zerodrift.train.measured import MeasuredEngine
from zerodrift.train.records import STEPS, RunFiles
from zerodrift.train.setup import begin, resume

FROM = 2
HEAD = ("train.inject=[path/head-precision]", f"train.inject_from={FROM}")
LEARNS = ("train.task=tests.unit.train.varied:task", "train.steps=5")


@pytest.fixture
def broken(run):
    """A recorded run with a head in bf16 from the weights of step 2 on."""
    training = run(*HEAD, *LEARNS)
    training.run(5)
    training.close()
    return training.files.directory


def test_it_acts_from_its_step_on_and_not_before(run, broken) -> None:
    sound = run(*LEARNS, at="sound")
    sound.run(5)
    steps = RunFiles(broken).steps()
    # One version may be learnt from a step late: rollouts of the sound engine are still there at step 2.
    assert [step.mismatch == 0 for step in steps] == [True, True, True, False, False]
    parted = [
        ours == theirs for ours, theirs in zip(digests(broken), digests(sound.files.directory), strict=True)
    ]
    assert parted == [True, True, True, False, False]


def test_a_replay_without_it_parts_there_and_one_with_it_does_not(broken, tmp_path) -> None:
    told = []
    without = done_again(
        broken, tmp_path / "without", without=["path/head-precision"], tell=lambda *each: told.append(each)
    )
    assert without.parted == FROM + 1
    assert [step.mismatch for step in without.steps] == [0.0] * 5
    assert [total for _, total in told] == [5] * 5
    same = done_again(broken, tmp_path / "same", 4)
    assert same.parted is None
    assert [step.digest for step in same.steps] == digests(broken)[:4]


def test_a_record_that_was_changed_is_found(broken, tmp_path) -> None:
    lines = (broken / STEPS).read_bytes().splitlines(keepends=True)
    other = msgspec.json.decode(lines[1])["digest"]
    lines[0] = lines[0].replace(digests(broken)[0].encode(), other.encode())
    (broken / STEPS).write_bytes(b"".join(lines))
    with pytest.raises(BitsDiffer, match="step 0"):
        done_again(broken, tmp_path / "again")
    with pytest.raises(BitsDiffer, match="step 0"):
        done_again(broken, tmp_path / "without", without=["path/head-precision"])


def test_what_cannot_be_taken_out_is_refused(broken, run, tmp_path) -> None:
    with pytest.raises(
        InvalidValue, match="no path/rope to take out of that run; it was planted with path/head-precision"
    ):
        done_again(broken, tmp_path / "a", without=["path/rope"])
    with pytest.raises(ConfigError, match="planted at step 2, and 2 steps end before"):
        done_again(broken, tmp_path / "b", FROM, without=["path/head-precision"])
    with pytest.raises(ConfigError, match="has 5 steps"):
        done_again(broken, tmp_path / "c", 6)
    sound = run("train.steps=1", at="sound")
    sound.run(1)
    with pytest.raises(InvalidValue, match="nothing was planted"):
        done_again(sound.files.directory, tmp_path / "d", without=["path/head-precision"])


def test_gone_on_with_after_a_stop(run) -> None:
    """The first batch after it is not scored again, its weights being gone: here no breaker asks for that."""
    settings = (*HEAD, *LEARNS, "monitoring.circuit_breaker_enabled=false")
    whole, stopped = run(*settings, at="whole"), run(*settings, at="stopped")
    whole.run(5)
    stopped.run(3)
    stopped.close()
    training = resume(stopped.files.directory)
    training.run(5)
    training.close()
    assert digests(stopped.files.directory) == digests(whole.files.directory)


def test_what_lives_on_old_weights_does_not_outlive_its_process(run) -> None:
    training = run("train.inject=[weights/partial]", "train.inject_from=2", "train.steps=5")
    training.run(4)
    training.close()
    with pytest.raises(ConfigError, match="weights from before, which went with the process"):
        resume(training.files.directory)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ("train.inject=[path/nope]", InvalidValue, "no fault 'path/nope'"),
        ("train.inject=[path/head-precision,path/head-precision:bf16]", InvalidValue, "twice"),
        ("train.inject=[trainer/autocast]", InvalidValue, "fault of the trainer"),
        ("train.inject=[semantic/raw-logprobs]", InvalidValue, "changes nothing at temperature 1"),
        ("train.inject=[weights/stale-prefix-cache]", CapabilityMissing, "cannot be planted in exact"),
    ],
)
def test_what_could_not_act_is_refused_before_anything_is_begun(tmp_path, settings, error, message) -> None:
    with pytest.raises(error, match=message):
        begin(small(settings), tmp_path / "run")
    assert not RunFiles(tmp_path / "run").exists


@pytest.mark.parametrize(
    "settings",
    [
        ["train.inject_from=2"],
        ["train.inject=[path/head-precision]", "train.inject_from=6"],
        ["train.inject=[path/head-precision]", "train.kv=keep"],
        ["train.inject=[path/head-precision]", "train.rollouts=vllm"],
    ],
)
def test_settings_that_contradict_each_other(settings) -> None:
    with pytest.raises((ConfigError, InvalidValue)):
        small(*settings)


def test_vanilla_transformers_is_off_by_rounding_and_done_again(run, tmp_path) -> None:
    training = run("train.rollouts=reference", *LEARNS)
    training.run(5)
    training.close()
    assert 0 < max(step.mismatch for step in RunFiles(training.files.directory).steps()) < 1e-4
    assert done_again(training.files.directory, tmp_path / "again", 3).parted is None


def test_sequences_in_flight_at_an_update_go_on_over_old_keys_and_values(run) -> None:
    """From the first update on, and the monitor sees it: what is labelled new was begun by the weights before."""
    training = run(
        "train.rollouts=reference", "train.inject=[weights/torn:kv-kept]", "train.inject_from=2", *LEARNS,
        "train.learning_rate=0.001", "train.max_lag=0", "monitoring.circuit_breaker_enabled=false",
    )  # fmt: skip
    training.run(5)
    training.close()
    steps = RunFiles(training.files.directory).steps()
    assert [step.mismatch > 1e-3 for step in steps] == [False, False, True, True, True]
    assert [step.lag for step in steps] == [0] * 5, "its labels say nothing of it"
    with pytest.raises(ConfigError, match="went with the process"):
        resume(training.files.directory)


class Counting(ReferenceBackend):
    """How often its cache was reset."""

    resets = 0

    def reset_cache(self):
        self.resets += 1


@pytest.mark.parametrize(("variant", "resets"), [("kept", 0), ("reset-ignored", 1)])
def test_who_plants_a_cache_that_nobody_resets_does_not_reset_it(tmp_path, variant, resets) -> None:
    reference = Counting("testbed:llama")
    reference.model.save_pretrained(tmp_path)
    engine = MeasuredEngine(reference, [FAULTS[f"weights/stale-prefix-cache:{variant}"]], 1)
    engine.load_weights(tmp_path, WeightVersion("step 0"))
    engine.reset_cache()
    assert reference.resets == 1
    engine.load_weights(tmp_path, WeightVersion("step 1"))
    before = Counting.resets, reference.resets
    engine.reset_cache()
    host = innermost(engine)
    assert host.resets - before[1] == resets

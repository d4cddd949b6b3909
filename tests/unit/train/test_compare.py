"""Real trainings of two configurations: done once each, gone on with, judged, and explained."""

import msgspec
import pytest
from tests.unit.train.conftest import small

from zerodrift.core.errors import ConfigError
from zerodrift.records.verdict import Outcome
from zerodrift.train.accused import accused
from zerodrift.train.compare import differences, do, finished, planned, series
from zerodrift.train.comparison import judge
from zerodrift.train.records import RunFiles

OFTEN = (
    "train.task=tests.unit.train.varied:task",
    "train.steps=3",
    "train.max_lag=0",
    "monitoring.circuit_breaker_enabled=false",
)
SOUND = small(*OFTEN)
RAW = small(*OFTEN, "sampling_defaults.temperature=0.5", "train.inject=[semantic/raw-logprobs]")
COOL = small(*OFTEN, "sampling_defaults.temperature=0.5")


def test_sides_take_turns_and_have_seeds_of_their_own_that_stay_when_more_are_asked_for(tmp_path):
    runs = planned((SOUND, SOUND), 2, tmp_path)
    assert [(run.side, run.seed, run.directory.name) for run in runs] == [
        ("A", 0, "a-seed-0"), ("B", 1, "b-seed-1"), ("A", 2, "a-seed-2"), ("B", 3, "b-seed-3"),
    ]  # fmt: skip
    assert planned((SOUND, SOUND), 3, tmp_path)[:4] == runs
    assert [run.config.train.seed for run in runs] == [0, 1, 2, 3]


def test_what_is_set_otherwise_is_told():
    assert list(differences(COOL, RAW)) == [("train.inject", "[]", '["semantic/raw-logprobs"]')]


def test_a_run_is_done_once_goes_on_where_it_stopped_and_is_refused_for_another_training(tmp_path):
    run, _ = planned((SOUND, SOUND), 1, tmp_path)
    stops = iter([False, True])
    assert not do(run, stopping=lambda: next(stops))
    assert not finished(run.directory, run.config)
    assert len(RunFiles(run.directory).steps()) == 1
    assert do(run)
    assert finished(run.directory, run.config)
    assert len(RunFiles(run.directory).steps()) == 3
    other = small(*OFTEN, "train.groups=4")
    with pytest.raises(ConfigError, match=r"has a training with train\.groups=3, and 4 is asked for now"):
        finished(run.directory, other)


def test_a_line_that_a_kill_tore_off_is_no_decision_of_the_monitor(tmp_path):
    run, _ = planned((SOUND, SOUND), 1, tmp_path)
    assert do(run)
    before = series(run)
    path = run.directory / "steps.jsonl"
    path.write_bytes(b'{"time":17951\n' + path.read_bytes())
    assert series(run) == before


def test_what_a_kill_left_of_a_warm_up_is_no_run(tmp_path):
    run, _ = planned((SOUND, SOUND), 1, tmp_path)
    run.directory.mkdir()
    (run.directory / "steps.jsonl").write_text("half of a li")
    assert not finished(run.directory, run.config)
    assert do(run)


def test_a_run_whose_fault_went_with_its_process_is_begun_anew(tmp_path):
    config = small(*OFTEN, "train.inject=[weights/partial]")
    run, _ = planned((config, config), 1, tmp_path)
    stops = iter([False, True])
    do(run, stopping=lambda: next(stops))
    assert do(run)
    assert len(RunFiles(run.directory).steps()) == 3


def test_raw_logprobs_differ_from_processed_ones_and_blame_says_why(tmp_path):
    runs = planned((COOL, RAW), 2, tmp_path)
    for run in runs:
        assert do(run)
    found = {side: [series(run) for run in runs if run.side == side] for side in "AB"}
    judged = judge(found["A"], found["B"])
    assert judged.outcome is Outcome.FAIL
    assert {"mismatch", "kl"} <= {row.name for row in judged.rows if row.differs}
    assert judged.since == 0
    assert not found["A"][0].reasons
    assert any("mismatch" in reason for reason in found["B"][0].reasons)
    sound = accused(runs[0].directory, tmp_path / "sound", 0)
    raw = accused(runs[1].directory, tmp_path / "raw", 0)
    # Twelve rollouts are few: what is wrong with a thirtieth of them could not be seen.
    assert sound.outcome is not Outcome.FAIL
    assert sound.causes == ()
    assert (raw.outcome, raw.causes[0]) == (Outcome.FAIL, "semantic/raw-logprobs")
    assert raw.fix
    assert msgspec.json.decode(msgspec.json.encode(raw))["rollouts"] == 12


def test_a_head_in_bf16_is_named_since_the_run_says_that_its_engine_computes_in_fp32(tmp_path):
    """By the numbers alone it could be an engine in bf16, and blame would ask which."""
    settings = ("train.inject=[path/head-precision]", "train.samples=16", "train.groups=6", "train.steps=1")
    config = small(*OFTEN, *settings)
    run, _ = planned((config, config), 1, tmp_path)
    assert do(run)
    found = accused(run.directory, tmp_path / "head", 0)
    assert (found.outcome, found.causes) == (Outcome.FAIL, ("path/head-precision",))
    assert accused(run.directory, tmp_path / "head", 0) == found


def test_runs_of_one_kind_do_not_differ(tmp_path):
    runs = planned((SOUND, SOUND), 2, tmp_path)
    for run in runs:
        assert do(run)
    judged = judge(*([series(run) for run in runs if run.side == side] for side in "AB"))
    assert judged.outcome is Outcome.PASS
    assert {row.name for row in judged.rows} >= {
        "reward",
        "clip_rate",
        "kl",
        "entropy",
        "ess",
        "lag",
        "mismatch",
    }

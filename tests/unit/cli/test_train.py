"""What `zerodrift train` refuses before anything is loaded; what it does, tests/reliability/test_train_kill.py shows."""

import msgspec
import pytest

from zerodrift.cli.train import BUNDLED, command
from zerodrift.config.load import load
from zerodrift.config.training import ObjectiveName
from zerodrift.core.errors import ConfigError, RecordError
from zerodrift.train.records import RunFiles


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resume": True}, "name it with --out"),
        ({"until": 3}, "give --replay RUN"),
        ({"resume": True, "out": "runs/a", "settings": ["train.seed=1"]}, "leave out --set"),
        ({"resume": True, "out": "runs/a", "objective": ObjectiveName.GSPO}, "leave out --objective"),
        ({"replay": "runs/a", "steps": 3}, "leave out --steps"),
        ({"replay": "runs/a", "config": "my.yaml"}, "leave out CONFIG"),
        ({"replay": "runs/a", "resume": True}, "leave one of them out"),
        ({"replay": "runs/a", "out": "runs/b"}, "leave out --out"),
        ({"replay": "runs/a", "inject": ["path/head-precision"]}, "leave out --inject"),
        ({"resume": True, "out": "runs/a", "inject_from": 3}, "leave out --inject-from"),
        ({"without": ["path/head-precision"]}, "give --replay RUN"),
    ],
)
def test_options_that_contradict_each_other(given, message):
    with pytest.raises(ConfigError, match=message):
        command(**given)


@pytest.mark.parametrize("given", [{"resume": True, "out": "nowhere"}, {"replay": "nowhere"}])
def test_a_run_that_is_not_there(given, tmp_path):
    given = {key: tmp_path / value if value == "nowhere" else value for key, value in given.items()}
    with pytest.raises(RecordError, match="no training was begun there"):
        command(**given)


def test_what_is_bundled_is_a_configuration():
    assert load(None, BUNDLED).train.task == "small-sums"


def test_a_fault_is_planted_taken_out_again_and_what_it_did_is_told(tmp_path, capsys):
    run = tmp_path / "a run"
    settings = [
        "train.groups=3", "train.samples=4", "train.warmup_steps=3", "train.rescore_one_in=1",
        "train.task=tests.unit.train.varied:task",
    ]  # fmt: skip
    command(out=run, steps=4, inject=["path/head-precision"], inject_from=1, settings=settings)
    assert f"zerodrift train --replay '{run}' does it again" in capsys.readouterr().out, "it can be pasted"
    command(replay=run, without=["path/head-precision"], out=tmp_path / "without")
    told = capsys.readouterr().out
    assert (
        "4 steps done again without path/head-precision: equal digests before step 2, others from there on"
        in told
    )
    steps = RunFiles(tmp_path / "without").steps()
    assert steps[-1].digest[:16] in told
    assert "mismatch 0 nats, 0 of 2 batches kept back" in told
    command(replay=run, until=2)
    assert (
        "2 steps done again, planted faults included: equal digests at every step" in capsys.readouterr().out
    )
    command(replay=run, until=1, as_json=True)
    assert msgspec.json.decode(capsys.readouterr().out)["parted"] is None

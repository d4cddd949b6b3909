"""What `zerodrift train` refuses before anything is loaded; what it does, tests/reliability/test_train_kill.py shows."""

import shutil

import msgspec
import pytest
import typer

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
        ({"seeds": 3}, "of --compare A B"),
        ({"condition": ["raw"]}, "give --story"),
        ({"story": True, "steps": 3}, "takes conditions of its own; leave out --steps"),
        ({"story": True, "compare": ("a.yaml", "b.yaml")}, "leave out --compare"),
        (
            {"compare": ("a.yaml", "b.yaml"), "config": "c.yaml"},
            "takes two configurations and begins anew; leave out CONFIG",
        ),
        ({"compare": ("a.yaml", "b.yaml"), "resume": True}, "leave out --resume"),
        ({"compare": ("a.yaml", "b.yaml"), "replay": "runs/a"}, "leave out --replay"),
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


def test_two_configurations_are_compared_once_and_told_again_without_training(tmp_path, capsys):
    config = tmp_path / "short.yaml"
    config.write_text(
        "model: {path: testbed:llama}\n"
        "sampling_defaults: {max_tokens: 3, temperature: 0.5}\n"
        "monitoring: {circuit_breaker_enabled: false}\n"
        "train: {groups: 3, samples: 4, warmup_steps: 3, task: 'tests.unit.train.varied:task', max_lag: 0}\n"
    )
    out = tmp_path / "compared"
    given = {
        "compare": (config, config),
        "seeds": 2,
        "out": out,
        "steps": 2,
        "inject": ["semantic/raw-logprobs"],
    }
    with pytest.raises(typer.Exit) as ended:
        command(**given)
    assert ended.value.exit_code == 1
    told = capsys.readouterr().out
    assert told.startswith("DIFFERENT  differs in ")
    assert "train.inject" in told
    assert "B  blame: FAIL of 12 rollouts of step 0, semantic/raw-logprobs: " in told
    assert "A  blame: " in told
    assert "A  blame: FAIL" not in told
    weights = [(each, each.read_bytes()) for each in sorted(out.glob("*/train.jsonl"))]
    assert len(weights) == 4
    with pytest.raises(typer.Exit):
        command(**given, as_json=True)
    record = msgspec.json.decode(capsys.readouterr().out)
    assert record["judged"]["outcome"] == "FAIL"
    assert [run["seed"] for side in record["sides"] for run in side["runs"]] == [0, 2, 1, 3]
    assert [(each, each.read_bytes()) for each in sorted(out.glob("*/train.jsonl"))] == weights
    with pytest.raises(ConfigError, match="choose another --out"):
        command(**{**given, "steps": 3})
    # Blame cannot be asked of a run whose rollouts are gone; that the sides differ stands.
    shutil.rmtree(out / "a-seed-0" / "blame")
    (out / "a-seed-0" / "rollouts.jsonl").write_bytes(b"")
    with pytest.raises(typer.Exit) as ended:
        command(**given)
    assert ended.value.exit_code == 1
    assert "A  blame could not be asked: " in capsys.readouterr().out


def test_the_story_is_told_of_the_pieces_that_are_there_and_goes_on(tmp_path, capsys):
    settings = [
        "train.groups=3", "train.samples=4", "train.warmup_steps=3", "train.steps=3",
        "train.task=tests.unit.train.varied:task", "train.checkpoint_every=2",
    ]  # fmt: skip
    given = {"story": True, "seeds": 1, "out": tmp_path, "settings": settings}
    command(**given, condition=["sound"])
    assert "differs  –" in capsys.readouterr().out
    first = (tmp_path / "sound-seed-0" / "train.jsonl").read_bytes()
    command(**given, condition=["all"], as_json=True)
    record = msgspec.json.decode(capsys.readouterr().out)
    assert [kind["name"] for kind in record["kinds"]] == ["sound", "all"]
    steps = [[step > 0.001 for step in kind["runs"][0]["values"]["mismatch"]] for kind in record["kinds"]]
    assert steps == [[False] * 3, [False, True, True]]
    assert (tmp_path / "sound-seed-0" / "train.jsonl").read_bytes() == first
    assert "all four" in (tmp_path / "story.html").read_text()
    told = {kind["name"]: (kind["receipt"]["arrival"], kind["receipt"]["cause"]) for kind in record["kinds"]}
    assert told == {"sound": ("confirmed", None), "all": ("missed", "weights/stale-prefix-cache")}


def test_one_run_of_each_side_cannot_be_judged(tmp_path, capsys):
    config = tmp_path / "short.yaml"
    config.write_text(
        "model: {path: testbed:llama}\ntrain: {groups: 2, samples: 2, warmup_steps: 1, steps: 1}\n"
        "sampling_defaults: {max_tokens: 2}\n"
    )
    with pytest.raises(typer.Exit) as ended:
        command(compare=(config, config), seeds=1, out=tmp_path / "compared")
    assert ended.value.exit_code == 3
    assert (
        "UNKNOWN  one run has no spread to compare with: 1 and 1 runs; give --seeds 3"
        in capsys.readouterr().out
    )


def test_what_is_bundled_is_a_configuration():
    assert load(None, BUNDLED).train.task == "small-sums"


def test_a_fault_is_planted_taken_out_again_and_what_it_did_is_told(tmp_path, capsys):
    run = tmp_path / "a run"
    settings = [
        "train.groups=3", "train.samples=4", "train.warmup_steps=3", "train.rescore_one_in=1",
        "train.task=tests.unit.train.varied:task", "train.checkpoint_every=2",
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

"""The loop as a whole, on the real engine: what it learns from, what it proves, and that it can be done again."""

import shutil

import msgspec
import pytest
import torch
from tests.unit.train.conftest import small

from zerodrift.core.errors import BitsDiffer, CheckpointMismatch, ConfigError, RecordError, TrainingHalted
from zerodrift.exact.logprobs import token_logprobs
from zerodrift.monitor.decision import State
from zerodrift.train.checkpoint import DIRECTORY
from zerodrift.train.learner import logprobs_of
from zerodrift.train.loop import Training
from zerodrift.train.records import JUDGED, ROLLOUTS, RUN, STEPS, RunFiles, versions_of
from zerodrift.train.setup import begin, replay, resume

MODES = ["train.max_lag=0", "train.max_lag=2 train.kv=keep", "train.max_lag=1 train.kv=recompute"]


def digests(directory):
    return [each.digest for each in RunFiles(directory).steps()]


def redone(directory, scratch, until):
    training = replay(directory, scratch)
    found = []
    try:
        training.run(until, found.append)
    finally:
        training.close()
    return found


@pytest.mark.parametrize(
    "mode", [MODES[1], *(pytest.param(each, marks=pytest.mark.long) for each in MODES[::2])]
)
def test_every_token_has_the_same_bits_and_a_replay_the_same_weights(run, tmp_path, mode) -> None:
    training = run(*mode.split())
    training.run(3)
    training.close()
    steps, groups = RunFiles(training.files.directory).steps(), RunFiles(training.files.directory).groups()
    assert [each.rescored for each in steps] == [each.tokens for each in steps]
    assert len(set(digests(training.files.directory))) > 1, "something was learnt"
    assert max(each.lag for each in steps) == training.config.train.max_lag
    assert all(each.state is State.OK for each in steps)
    for step in steps:
        for index in step.groups:
            assert step.step - groups[index].oldest <= training.config.train.max_lag
    assert redone(training.files.directory, tmp_path / "again", 3) == steps


def test_weights_change_in_flight(run) -> None:
    training = run(
        "train.kv=keep",
        "train.max_lag=2",
        "sampling_defaults.max_tokens=64",
        "sampling_defaults.ignore_eos=true",
    )
    mixed = []
    # Whether something is in flight when weights come is the machine's doing: on a busy one, not within three steps.
    for until in (3, 6, 12, 24):
        training.run(until)
        groups = RunFiles(training.files.directory).groups().values()
        mixed = [output for group in groups for output in group.outputs if len(versions_of(output)) > 1]
        if mixed:
            break
    assert mixed, "nothing was in flight at an update, so this test showed nothing"


def test_stopped_anywhere_and_gone_on_with(run) -> None:
    """Also: a schedule that drains follows from the configuration alone."""
    whole = run(at="whole")
    whole.run(5)
    parts = run(at="parts")
    parts.run(2)
    parts.close()
    parts = resume(parts.files.directory)
    parts.run(5)
    parts.close()
    assert digests(parts.files.directory) == digests(whole.files.directory)


def test_what_a_kill_leaves_is_done_again(run, tmp_path) -> None:
    """Steps after the last checkpoint, torn lines, and groups that were made and not learnt from or lost."""
    whole = run()
    whole.run(6)
    whole.close()
    directory, expected = whole.files.directory, digests(whole.files.directory)
    for name, kept in ((ROLLOUTS, 13), (STEPS, 5)):
        lines = (directory / name).read_bytes().splitlines(keepends=True)
        (directory / name).write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
    (directory / "checkpoints" / "step-000006").rename(tmp_path / "lost")
    again = resume(directory)
    assert again.step == 3
    again.run(6)
    again.close()
    assert digests(directory) == expected


def test_a_batch_that_was_judged_before_a_kill_counts_once(run, monkeypatch) -> None:
    """Judged and not recorded, twice: of the first step, and of a later one."""
    unbroken = run("train.max_lag=0", at="unbroken")
    unbroken.run(3)
    broken = run("train.max_lag=0")
    directory = broken.files.directory
    for recorded in (0, 2):
        broken.run(recorded)
        with monkeypatch.context() as patch:
            patch.setattr(Training, "_learn", killed)
            with pytest.raises(KeyboardInterrupt):
                broken.run(3)
        broken.close()
        assert judged_steps(directory)[-1] == recorded, "it was judged, so that this test shows something"
        broken = resume(directory)
        assert judged_steps(directory) == list(range(recorded)), "nothing says what nobody recorded"
    broken.run(3)
    broken.close()
    assert broken.monitor.remembered == unbroken.monitor.remembered
    assert judged_steps(directory) == [0, 1, 2]


def test_a_run_without_the_monitors_state_before_says_so(run, caplog) -> None:
    training = run("train.max_lag=0")
    training.run(2)
    training.close()
    path = training.files.directory / STEPS
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    (training.files.directory / JUDGED).unlink()
    again = resume(training.files.directory)
    again.close()
    assert again.monitor.remembered.step == 0
    assert "judged up to step 1, and step 0 is the last that was recorded" in caplog.text


def killed(*_):
    raise KeyboardInterrupt


def judged_steps(directory):
    return [
        msgspec.json.decode(line)["step"] for line in (directory / "steps.jsonl").read_bytes().splitlines()
    ]


def test_a_changed_rollout_is_found_by_a_replay(run, tmp_path) -> None:
    training = run()
    training.run(2)
    training.close()
    path = training.files.directory / ROLLOUTS
    groups = list(RunFiles(training.files.directory).groups().values())
    output = groups[1].outputs[0]
    changed = msgspec.structs.replace(output, logprobs=(output.logprobs[0] - 2**-20, *output.logprobs[1:]))
    groups[1] = msgspec.structs.replace(groups[1], outputs=(changed, *groups[1].outputs[1:]))
    path.write_bytes(b"".join(msgspec.json.encode(group) + b"\n" for group in groups))
    with pytest.raises(BitsDiffer, match="g1"):
        redone(training.files.directory, tmp_path / "again", 2)


def test_a_changed_digest_is_found_by_a_replay(run, tmp_path) -> None:
    training = run()
    training.run(2)
    training.close()
    path = training.files.directory / STEPS
    steps = training.files.steps()
    steps[1] = msgspec.structs.replace(steps[1], digest="0" * 64)
    path.write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))
    with pytest.raises(BitsDiffer, match="step 1 was recorded with digest 0000"):
        redone(training.files.directory, tmp_path / "again", 2)


def test_an_engine_with_a_wrong_bit_stops_the_training(run) -> None:
    training = run("train.max_lag=0")
    training.run(1)
    with torch.no_grad():
        # What no transaction brought: the engine's own tensor is written to.
        next(training.source.engine.model.parameters()).mul_(1 + 2**-10)
    before = training.learner.parameters["model.norm.weight"].clone()
    with pytest.raises(BitsDiffer):
        training.run(3)
    assert torch.equal(before, training.learner.parameters["model.norm.weight"]), "nothing was learnt from it"
    assert len(training.files.steps()) == 1


def test_the_breaker_pauses_the_loop_and_a_resume_goes_on(run, tmp_path) -> None:
    training = run(
        "monitoring.least_ess=1.0", "monitoring.consecutive_windows=1", "train.learning_rate=0.001"
    )
    with pytest.raises(TrainingHalted, match="halted the training at step"):
        training.run(6)
    steps = training.files.steps()
    assert (steps[-1].state, steps[-1].trained) == (State.HALT, False)
    assert steps[-1].digest == steps[-2].digest, "a batch that was kept back teaches nothing"
    training.close()
    again = resume(training.files.directory)
    assert again.step == len(steps)
    again.close()
    whole = redone(training.files.directory, tmp_path / "again", len(steps))
    assert whole == steps, "a halt that was recorded is replayed as any step, whoever it stopped then"
    # Killed before the checkpoint of the halt: what was recorded is done again, and the run goes on.
    shutil.rmtree(training.files.directory / DIRECTORY / f"step-{len(steps):06}")
    again = resume(training.files.directory)
    again.run(len(steps))
    again.close()
    assert training.files.steps() == steps


def test_a_second_training_does_not_begin_over_a_first(run) -> None:
    training = run()
    training.close()
    with pytest.raises(ConfigError, match="has a training already"):
        begin(small(), training.files.directory)


def test_nothing_to_resume(tmp_path) -> None:
    with pytest.raises(RecordError, match="no training was begun there"):
        resume(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("threads", 7, "threads 7"), ("torch", "1.0", "torch 1.0"), ("numeric", {"isa": "VAX"}, "numeric")],
)
def test_a_run_that_was_computed_otherwise_is_refused(run, field, value, said) -> None:
    training = run()
    training.close()
    path = training.files.directory / RUN
    header = msgspec.structs.replace(training.files.header(), **{field: value})
    path.write_bytes(msgspec.json.encode(header))
    with pytest.raises(CheckpointMismatch, match=f"the run was made with {said}"):
        resume(training.files.directory)


def test_every_option_of_the_loss_trains_and_replays(run, tmp_path) -> None:
    training = run(
        "train.objective=ppo-clip", "train.kl_coef=0.1", "train.entropy_coef=0.01", "train.overlong=mask", "train.epochs=2",
        "train.correction=tis", "train.zero_advantage=keep", "train.micro_batch_tokens=20", "train.on_lag=drop",
        "train.buffer_groups=12",
    )  # fmt: skip
    training.run(3)
    training.close()
    steps = training.files.steps()
    assert steps[0].kl == 0.0, "the reference is where it began"
    assert steps[-1].kl > 0
    assert any(step.dropped for step in steps)
    assert redone(training.files.directory, tmp_path / "again", 3) == steps


def test_an_answer_that_came_several_times_is_computed_once_with_the_gradients_of_all(run) -> None:
    training = run("train.samples=16", "train.groups=2", "train.task=small-sums")
    training.run(1)
    outputs = [
        output for group in RunFiles(training.files.directory).groups().values() for output in group.outputs
    ]
    assert len({(output.request_id, output.token_ids) for output in outputs}) < len(outputs), (
        "none came twice, so this test showed nothing"
    )
    model = training.learner.model
    found = {}
    for score in (logprobs_of, token_logprobs):
        model.zero_grad()
        rows = score(model, outputs)
        torch.cat(rows).sum().backward()
        found[score] = (torch.cat(rows).detach(), [each.grad.clone() for each in model.parameters()])
    model.zero_grad()
    assert torch.equal(found[logprobs_of][0], found[token_logprobs][0]), "the same bits"
    for once, each in zip(found[logprobs_of][1], found[token_logprobs][1], strict=True):
        torch.testing.assert_close(once, each, rtol=1e-4, atol=1e-4)


def test_the_page_shows_the_mismatch_of_every_step_that_scored_something_again(run):
    """Of what was scored again, which is not all: the terminal and train.jsonl have told of it from the beginning."""
    training = run("train.rescore_one_in=4")
    training.run(6)
    steps = training.files.steps()
    judged = (training.files.directory / "steps.jsonl").read_bytes().splitlines()
    lines = [msgspec.json.decode(line) for line in judged]
    parts = [each for each in steps if 0 < each.rescored < each.tokens]
    assert parts, "a training whose batches are old in part, or all scored, tests nothing here"
    for step, line in zip(steps, lines, strict=True):
        assert ("zerodrift/mismatch/mean_abs" in line["metrics"]) == bool(step.rescored)
        assert line["metrics"].get("zerodrift/mismatch/mean_abs", 0.0) == 0.0

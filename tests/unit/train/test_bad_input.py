"""What a user, an engine or a disk can do wrong: a named error, nothing trained on, and the run can go on."""

import math
import time

import msgspec
import pytest
import torch
from tests.unit.train.conftest import small

from zerodrift.config.load import load
from zerodrift.config.training import RolloutsFrom, TrainConfig, UpdateKV
from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.errors import (
    CheckpointMismatch,
    ConfigError,
    EngineStopped,
    InvalidValue,
    NonFinite,
    RecordError,
    RewardFailed,
    RewardMisbound,
    VersionConflict,
)
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.engine.output import Output
from zerodrift.monitor.rewards import BoundReward
from zerodrift.train.checkpoint import DIRECTORY, STATE, TENSORS, read_checkpoint, write_checkpoint
from zerodrift.train.learner import Learner
from zerodrift.train.prompts import PromptStream
from zerodrift.train.records import GroupRecord, output_id, version_number
from zerodrift.train.rewards import rewards_of
from zerodrift.train.setup import begin, resume

PROMPT = Prompt((5, 6))
_URL, _FILE = "engine.url=http://127.0.0.1:1", "train.admin_token_file=no_such_token"


class Toy:
    name = "toy"

    def __init__(self, reward=lambda: 1.0, prompts=None) -> None:
        self._reward, self._prompts = reward, prompts

    def prompts(self, count, seed):
        return [PROMPT] * count if self._prompts is None else self._prompts(count)

    def reward(self, prompt, completion):
        return self._reward()


def fails():
    raise OSError("no verifier there")


BAD_REWARDS = [
    (fails, "OSError: no verifier there"),
    (lambda: math.nan, "gave nan as the reward"),
    (lambda: math.inf, "gave inf as the reward"),
    (lambda: "1.0", "gave '1.0' as the reward"),
    (lambda: time.sleep(5), "no rewards for the answers to prompt 7 within 0.05 s"),
]


def output(index=0, tokens=(7, 8)):
    return Output(
        prompt_token_ids=(5, 6), token_ids=tokens, logprobs=(-0.5,) * len(tokens), kind=LogprobKind.PROCESSED,
        sampling=SamplingParams(n=2), finish_reason=FinishReason.STOP, fingerprint="f", sample_index=index,
        versions=(VersionSpan(WeightVersion("step 3"), 0, len(tokens)),), request_id="g7", numeric={},
    )  # fmt: skip


@pytest.mark.parametrize(("reward", "message"), BAD_REWARDS)
def test_a_reward_that_is_none(reward, message) -> None:
    with pytest.raises(RewardFailed, match=message):
        rewards_of(Toy(reward), 7, PROMPT, [output()], timeout_s=0.05 if "within" in message else 5)


def test_rewards_are_bound_to_outputs() -> None:
    outputs = (output(0), output(1, (9,)))
    rewards = rewards_of(Toy(), 7, PROMPT, outputs, timeout_s=5)
    group = GroupRecord(index=7, asked_at=3, outputs=outputs, rewards=rewards)
    assert group.values() == [1.0, 1.0]
    assert group.oldest == 3
    with pytest.raises(RewardMisbound, match="a reward for g7/1"):
        msgspec.structs.replace(group, rewards=rewards[::-1]).values()
    changed = BoundReward("g7/1", output_id(output(1, (8,)))[1], 1.0)
    with pytest.raises(RewardMisbound, match="stands beside g7/1"):
        msgspec.structs.replace(group, rewards=(rewards[0], changed)).values()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Toy(prompts=lambda count: []), "gave 0 prompts where 3 were asked for"),
        (Toy(prompts=lambda count: [PROMPT] * min(count, 4)), "gave 4 prompts where 6"),
        (Toy(prompts=lambda count: [Prompt((count,))] * count), "gave other prompts for the same seed"),
        (Toy(prompts=lambda count: fails()), "gave no prompts: OSError"),
        (Toy(prompts=lambda count: ["2+2="] * count), "prompt 0 is a str"),
        (Toy(prompts=lambda count: [Prompt((600,))] * count), "prompt\\[0\\] is 600"),
    ],
)
def test_a_task_without_enough_prompts(task, message) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptStream(task, small(), 512).prompt(5)


def test_greedy_rollouts_teach_nothing() -> None:
    with pytest.raises(ConfigError, match="temperature is 0"):
        PromptStream(Toy(), small("sampling_defaults.temperature=0"), 512)


def test_seeds_differ_by_group_and_by_run() -> None:
    ours, theirs = PromptStream(Toy(), small(), 512), PromptStream(Toy(), small("train.seed=1"), 512)
    seeds = [stream.sampling(index).seed for stream in (ours, theirs) for index in range(100)]
    assert len(set(seeds)) == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.path=null"], "model.path is not set"),
        (
            ["engine.name=vllm"],
            "engine.name is set with train.rollouts=exact, which generates in this process",
        ),
        (["engine.enable_prefix_caching=false"], "engine.enable_prefix_caching is set"),
        ([_URL], "engine.url is set with train.rollouts=exact.*asks the server at engine.url"),
        (["train.rollouts=serve"], "write its address into engine.url"),
        (["train.rollouts=serve", _URL], "takes the admin token; name its file in train.admin_token_file"),
        (["train.rollouts=serve", _URL, _FILE, "engine.api_key_env=KEY"], "engine.api_key_env is set"),
        (
            ["train.rollouts=serve", _URL, _FILE, "engine.name=vllm"],
            "engine.name is 'vllm' with train.rollouts=serve",
        ),
        (["train.rollouts=serve", _URL, _FILE], "no_such_token cannot be read"),
        (
            ["train.rollouts=vllm", _URL, "engine.block_size=16"],
            "engine.block_size is set.*where the server is started",
        ),
    ],
)
def test_what_cannot_be_trained(tmp_path, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        begin(load(None, ["train.warmup_steps=0", *settings]), tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"admin_token_file": "token"}, "rollouts=exact, which has no use for it"),
        (
            {"rollouts": RolloutsFrom.VLLM, "admin_token_file": "token"},
            "rollouts=vllm, which has no use for it",
        ),
        ({"rollouts": RolloutsFrom.SERVE, "kv": UpdateKV.KEEP}, "kv is keep with rollouts=serve"),
    ],
)
def test_settings_of_rollouts_that_contradict_each_other(changes, message) -> None:
    with pytest.raises(InvalidValue, match=message):
        TrainConfig(**changes)


UNDEFINED = [
    (["sampling_defaults.top_k=2", "train.max_lag=0", "train.kl_coef=0.1"], "top_k=2.* set train.kl_coef=0"),
    (["sampling_defaults.top_p=0.9", "train.max_lag=1"], "top_p=0.9.* set train.max_lag=0"),
    (
        ["sampling_defaults.min_p=0.1", "train.max_lag=0", "train.entropy_coef=0.1", "train.epochs=2"],
        "min_p=0.1.* set train.epochs=1 or train.entropy_coef=0",
    ),
]


@pytest.mark.parametrize(("settings", "message"), UNDEFINED)
def test_what_truncated_sampling_leaves_undefined(tmp_path, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        begin(small(*settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("settings", [["train.entropy_coef=0.05"], ["train.epochs=2"]])
def test_what_truncated_sampling_leaves_defined_is_trained_and_read_back(run, settings) -> None:
    """With steps so long that the weights of one epoch cut off what those before had drawn."""
    training = run(
        "sampling_defaults.top_k=2", "train.max_lag=0", "train.learning_rate=0.02", "train.zero_advantage=keep",
        "train.warmup_steps=20", "train.task=small-sums", "train.samples=8", *settings,
    )  # fmt: skip
    training.run(2)
    assert all(step.trained for step in training.files.steps())


@pytest.mark.parametrize("label", ["initial", "step", "step -1", "7"])
def test_a_version_that_no_training_names(label) -> None:
    with pytest.raises(RecordError, match="a training calls its own 'step 7'"):
        version_number(WeightVersion(label))


# --- checkpoints -------------------------------------------------------------------------------------------------------


def learner(model):
    return Learner(model, TrainConfig())


def stepped(model):
    found = learner(model)
    for parameter in found.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    found.apply()
    return found


def test_a_checkpoint_has_weights_moments_and_cursor(tmp_path) -> None:
    ours, theirs = stepped(torch.nn.Linear(2, 3)), learner(torch.nn.Linear(2, 3))
    write_checkpoint(tmp_path, ours, 4, 12)
    assert read_checkpoint(tmp_path, theirs, 4).cursor == 12
    for name, parameter in ours.parameters.items():
        assert torch.equal(parameter, theirs.parameters[name])
        for moment, value in ours.optimizer.state[parameter].items():
            assert torch.equal(value, theirs.optimizer.state[theirs.parameters[name]][moment])


def test_the_first_and_the_last_two_are_kept(tmp_path) -> None:
    for step in (0, 3, 6, 9):
        write_checkpoint(tmp_path, learner(torch.nn.Linear(2, 3)), step, 0)
    assert sorted(path.name for path in (tmp_path / DIRECTORY).iterdir()) == [
        "step-000000", "step-000006", "step-000009",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "model", [torch.nn.Linear(2, 4), torch.nn.Linear(2, 3, bias=False), torch.nn.LayerNorm(3)]
)
def test_a_checkpoint_of_another_model_changes_nothing(tmp_path, model) -> None:
    write_checkpoint(tmp_path, stepped(torch.nn.Linear(2, 3)), 1, 0)
    other = learner(model)
    before = {name: parameter.clone() for name, parameter in other.parameters.items()}
    with pytest.raises(CheckpointMismatch, match="is of another model"):
        read_checkpoint(tmp_path, other, 1)
    assert all(torch.equal(before[name], parameter) for name, parameter in other.parameters.items())


def test_a_damaged_checkpoint_is_refused(tmp_path) -> None:
    write_checkpoint(tmp_path, stepped(torch.nn.Linear(2, 3)), 1, 0)
    path = tmp_path / DIRECTORY / "step-000001" / TENSORS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointMismatch, match="damaged or exchanged"):
        read_checkpoint(tmp_path, learner(torch.nn.Linear(2, 3)), 1)
    (path.parent / STATE).write_text("{")
    with pytest.raises(RecordError, match="cannot be read as a checkpoint"):
        read_checkpoint(tmp_path, learner(torch.nn.Linear(2, 3)), 1)


def test_gradients_that_are_no_numbers_change_nothing() -> None:
    ours = learner(torch.nn.Linear(2, 3))
    before = ours.parameters["weight"].clone()
    ours.parameters["weight"].grad = torch.full_like(before, torch.nan)
    with pytest.raises(NonFinite, match="the weights stay as they were"):
        ours.apply()
    assert torch.equal(before, ours.parameters["weight"])


@pytest.mark.parametrize(("passes", "said"), [(1, "the weights stay"), (2, "earlier passes over the batch")])
def test_a_loss_that_is_no_number_is_refused_before_it_is_recorded(run, passes, said) -> None:
    training = run("train.max_lag=0", "train.epochs=2", "train.zero_advantage=keep")
    objective, calls = training.learner._objective, []

    def loss(inputs, clip):
        calls.append(inputs)
        part = objective.loss(inputs, clip)
        return part._replace(loss=part.loss * math.inf) if len(calls) == passes else part

    training.learner._objective = objective._replace(loss=loss)
    with pytest.raises(NonFinite, match=said):
        training.run(1)
    assert all(parameter.grad is None for parameter in training.learner.parameters.values())
    assert training.files.steps() == []


def test_a_step_that_could_not_be_read_back_is_not_written(run) -> None:
    training = run("train.max_lag=0")
    training.run(1)
    (step,) = training.files.steps()
    for field in ("loss", "ess"):
        with pytest.raises(NonFinite, match=f"{field}=inf"):
            training.files.keep_step(msgspec.structs.replace(step, **{field: math.inf}))
    assert training.files.steps() == [step]


# --- in the middle of a run: nothing is trained on, and it goes on --------------------------------------------------------


def test_whatever_fails_in_a_step_the_run_goes_on(run) -> None:
    """One run that is broken in four ways, one after another, and ends where one that was never broken does."""
    training = run("train.max_lag=0")
    directory = training.files.directory
    training.run(1)
    training.prompts.task.reward = lambda prompt, completion: fails()
    stopped_by(RewardFailed, training)

    training = resume(directory)
    training.source._loop.stop(drain=False)
    stopped_by(EngineStopped, training)

    training = resume(directory)
    # It answers with weights that it was never given.
    training.source._published[1] = WeightVersion("step 1", "0" * 64)
    stopped_by(VersionConflict, training)

    training = resume(directory)
    learn = training.learner.apply
    with_nan = training.learner.parameters["model.norm.weight"]
    training.learner.apply = lambda: (learn(), with_nan.data.fill_(torch.nan))[0]
    stopped_by(NonFinite, training)

    training = resume(directory)
    training.run(2)
    training.close()
    unbroken = run("train.max_lag=0", at="unbroken")
    unbroken.run(2)
    assert training.files.steps()[-1].digest == unbroken.files.steps()[-1].digest


def stopped_by(error, training):
    with pytest.raises(error):
        training.run(2)
    training.close()
    assert len(training.files.steps()) == 1, "the step that failed left nothing behind"

"""`attach` on a trainer of the same shape as TRL's; the real one is in tests/contract/test_trl_real.py."""

import logging
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.core.errors import InvalidValue, MissingExtra
from zerodrift.core.request import SHAPING
from zerodrift.integrations import trl_checks
from zerodrift.integrations.trl import TRL_NAMES, attach, gather_of, keep_back
from zerodrift.integrations.trl_batch import groups_of, loss_mask, old_logprobs, rewards_of, versions_of
from zerodrift.integrations.trl_checks import KNOWN, READ, WRAPPED
from zerodrift.integrations.trl_scores import recorded, rows
from zerodrift.monitor.decision import State
from zerodrift.monitor.monitor import Monitor
from zerodrift.records.archive.reader import ArchiveReader

ROWS, PROMPT, TOKENS, VOCABULARY = 8, 3, 120, 50


class Accelerator:
    num_processes = 1
    process_index = 0
    is_main_process = True
    device = torch.device("cpu")


class GRPOTrainer:
    """Eight completions of two prompts a step, by an engine that is off by `nats`."""

    def __init__(self, nats=1e-5):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))
        self.model = SimpleNamespace(training=True, config=config)
        self.args = SimpleNamespace(
            per_device_train_batch_size=ROWS,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            max_completion_length=TOKENS,
            fp16=False,
            max_grad_norm=1.0,
            temperature=0.7,
            top_p=1.0,
            top_k=0,
            min_p=None,
            repetition_penalty=1.0,
            generation_kwargs=None,
        )
        self.state = SimpleNamespace(global_step=0)
        self.accelerator = Accelerator()
        self.num_iterations = 1
        self.use_vllm = self.use_transformers_continuous_batching = False
        self.rollout_func = object()
        self.reward_weights = torch.tensor([1.0, 2.0])
        self.nats, self.extra, self.callbacks, self.logged = nats, {}, [], []
        self.forwards = 0
        self.generator = torch.Generator().manual_seed(0)

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def remove_callback(self, callback):
        self.callbacks.remove(callback)

    def log(self, logs, start_time=None):
        logs.update({"reward": 1.0})
        self.logged.append(logs)

    def _generate_single_turn(self, *args):
        return [[1]], None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        return torch.rand(ROWS, 2, generator=self.generator)

    def _get_per_token_logps_and_entropies(self, model, ids, attended, keep, batch_size):
        assert not torch.is_grad_enabled()
        assert ids.shape == attended.shape == (ROWS, PROMPT + TOKENS)
        self.forwards += 1
        return self.trainer_logprobs, None, None

    def _generate_and_score_completions(self, inputs):
        for row in inputs:
            row.update(self.extra)
        self._calculate_rewards(inputs, None, None, None)
        self.trainer_logprobs = -torch.empty(ROWS, TOKENS).exponential_(generator=self.generator) - 0.5
        noise = self.nats * torch.randn(ROWS, TOKENS, generator=self.generator)
        mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
        mask[0, 15:] = 0
        padding = torch.zeros(ROWS, PROMPT, dtype=torch.long)
        padding[:, 1:] = 1
        return {
            "prompt_ids": torch.arange(ROWS).repeat_interleave(PROMPT).view(ROWS, PROMPT),
            "prompt_mask": padding,
            "completion_ids": torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=self.generator),
            "completion_mask": mask,
            "advantages": torch.randn(ROWS, generator=self.generator),
            "num_items_in_batch": mask.sum(),
            "sampling_per_token_logps": (self.trainer_logprobs + noise).clamp(max=0) * mask,
        }

    def step(self):
        """What the real one does in a step, in its order. Returns the batch, and whether training stops."""
        output = self._generate_and_score_completions([{"prompt": str(place // 4)} for place in range(ROWS)])
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        control = SimpleNamespace(should_training_stop=False)
        optimizer = SimpleNamespace(param_groups=[{"params": [parameter]}])
        for callback in self.callbacks:
            callback.on_pre_optimizer_step(self.args, self.state, control, optimizer=optimizer)
        self.state.global_step += 1
        for callback in self.callbacks:
            callback.on_step_end(self.args, self.state, control)
        self.log({"loss": 0.0})
        return output, parameter.grad is not None, control.should_training_stop


GRPOTrainer.__module__ = "trl.trainer.grpo_trainer"


@pytest.fixture(autouse=True)
def _known_version(monkeypatch):
    monkeypatch.setattr(trl_checks, "trl_version", lambda: "1.16.0")


def test_a_healthy_batch_is_trained_on_as_it_is():
    trainer = GRPOTrainer(nats=0.005)
    plain = GRPOTrainer(nats=0.005).step()[0]
    watch = attach(trainer)
    output, stepped, stops = trainer.step()
    assert watch.last.state is State.OK
    assert (stepped, stops, watch.kept_back) == (True, False, 0)
    assert set(output) == set(plain)
    assert all(torch.equal(output[name], plain[name]) for name in plain)
    assert (watch.last.tokens, watch.last.sequences) == (ROWS * TOKENS - 105, ROWS)
    assert watch.last.lag_max == 0
    assert trainer.forwards == 1


def test_numbers_go_into_the_trainers_own_log_and_its_own_win():
    trainer = GRPOTrainer(nats=0.005)
    attach(trainer)
    trainer.step()
    logged = trainer.logged[0]
    assert logged["loss"] == 0.0
    assert logged["reward"] == 1.0
    assert 0 < logged["zerodrift/mismatch/mean_abs"] < 0.01
    assert logged["sampling/sampling_logp_difference/mean"] == logged["zerodrift/total/mean_abs"]
    assert set(TRL_NAMES) <= set(logged)
    assert logged["zerodrift/unscorable"] == 0
    trainer.log({})
    assert set(trainer.logged[1]) == {"reward"}


def test_nothing_is_logged_where_nothing_is_to_be():
    trainer = GRPOTrainer()
    attach(trainer, report=False)
    trainer.step()
    assert set(trainer.logged[0]) == {"loss", "reward"}


def test_a_bad_batch_has_no_gradient_and_takes_no_step_and_the_third_stops(caplog):
    trainer = GRPOTrainer(nats=0.3)
    watch = attach(trainer)
    with caplog.at_level(logging.WARNING):
        found = [trainer.step() for _ in range(3)]
    assert [stops for _, _, stops in found] == [False, False, True]
    for output, stepped, _ in found:
        assert not stepped
        assert not output["advantages"].any()
        assert not loss_mask(output).any()
        assert output["completion_mask"].any(), "attention stays as it was"
        assert not {"sampling_per_token_logps", "old_per_token_logps"} & set(output)
    assert watch.kept_back == 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    assert "above-gate" in caplog.text


def test_where_the_breaker_is_off_it_only_warns():
    trainer = GRPOTrainer(nats=0.3)
    watch = attach(trainer, Monitor(MonitoringConfig(circuit_breaker_enabled=False)))
    for _ in range(4):
        output, stepped, stops = trainer.step()
        assert (stepped, stops) == (True, False)
        assert output["advantages"].any()
    assert watch.last.would_be is State.HALT


def test_a_step_with_one_good_batch_is_taken():
    trainer = GRPOTrainer(nats=0.3)
    watch = attach(trainer)
    trainer.args.gradient_accumulation_steps = 2
    control = SimpleNamespace(should_training_stop=False)
    trainer._generate_and_score_completions([{} for _ in range(ROWS)])
    watch._callback.on_substep_end(trainer.args, trainer.state, control)
    trainer.nats = 0.0
    _, stepped, _ = trainer.step()
    assert stepped
    assert watch.kept_back == 1
    assert watch.last.step == 1, "two generations within one optimizer step are two steps of the monitor"
    trainer.nats = 0.3
    assert not trainer.step()[1], "the good batch of the step before is forgotten"
    assert watch.last.step == 2


def test_evaluation_is_not_judged():
    trainer = GRPOTrainer(nats=0.3)
    watch = attach(trainer)
    trainer.model.training = False
    output, stepped, _ = trainer.step()
    assert watch.last is None
    assert stepped
    assert output["advantages"].any()
    assert set(trainer.logged[0]) == {"loss", "reward"}


def test_nan_is_seen_before_trl_makes_it_a_ratio_of_1():
    trainer = GRPOTrainer()
    original = trainer._generate_and_score_completions

    def with_nan(inputs):
        output = original(inputs)
        output["sampling_per_token_logps"][2, 3] = torch.nan
        output["importance_sampling_ratio"] = torch.ones(ROWS, 1)
        output["old_per_token_logps"] = trainer.trainer_logprobs
        return output

    trainer._generate_and_score_completions = with_nan
    watch = attach(trainer)
    output, stepped, _ = trainer.step()
    assert "not-finite" in {reason.code for reason in watch.last.reasons}
    assert not stepped
    assert trainer.forwards == 0, "the trainer had its own"
    assert not output["importance_sampling_ratio"].any()
    watch.detach()
    assert trainer._generate_and_score_completions is with_nan


def test_missing_logprobs_are_no_healthy_batch():
    trainer = GRPOTrainer()
    original = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: {
        name: value for name, value in original(inputs).items() if name != "sampling_per_token_logps"
    }
    watch = attach(trainer)
    trainer.step()
    assert {reason.code for reason in watch.last.reasons} >= {"missing-logprobs"}


def test_rewards_are_weighted_and_those_that_nobody_gave_are_counted():
    trainer = GRPOTrainer()
    given = torch.tensor([[1.0, 0.5], [torch.nan, 1.0], [torch.nan, torch.nan]])
    found = rewards_of(trainer, given, 3)
    assert found[:2].tolist() == [2.0, 2.0]
    assert found[2].isnan()
    trainer._calculate_rewards = lambda *_: torch.full((ROWS, 2), torch.nan)
    watch = attach(trainer)
    trainer.step()
    assert watch.last.state is State.OK
    assert watch.last.rewards is None
    assert trainer.logged[0]["zerodrift/unscorable"] == ROWS


def test_a_reward_that_is_not_finite_is_a_bad_batch():
    trainer = GRPOTrainer()
    trainer._calculate_rewards = lambda *_: torch.full((ROWS, 2), torch.inf)
    watch = attach(trainer)
    trainer.step()
    assert {reason.code for reason in watch.last.reasons} == {"reward-not-finite"}


@pytest.mark.parametrize(
    ("extra", "use_vllm", "versions"),
    [
        ({}, False, 7),
        ({}, True, 5),
        ({"weight_version": 6}, True, [6, 6]),
        ({"weight_version": [5, 6]}, False, [[5, 6, 6], [5, 6, 6]]),
    ],
)
def test_versions_are_what_a_rollout_says_or_what_trl_believes(extra, use_vllm, versions):
    trainer = GRPOTrainer()
    trainer.state.global_step, trainer.use_vllm, trainer._last_loaded_step = 7, use_vllm, 5
    assert versions_of(trainer, [dict(extra), dict(extra)], 3) == versions


def test_old_weights_that_are_said_are_no_mismatch():
    trainer = GRPOTrainer(nats=0.05)
    trainer.extra, trainer.state.global_step = {"weight_version": 1}, 2
    watch = attach(trainer)
    trainer.step()
    assert watch.last.lag_max == 1
    assert not watch.last.mismatch.observable
    assert trainer.logged[0]["zerodrift/mismatch/observable"] == 0


@pytest.mark.parametrize(
    "told",
    [
        pytest.param({0: 0}, id="one is told"),
        pytest.param(dict.fromkeys(range(ROWS)), id="all are None"),
        pytest.param({0: None, **dict.fromkeys(range(1, ROWS), 0)}, id="one is None"),
        pytest.param({0: None, **dict.fromkeys(range(1, ROWS), [0] * 15)}, id="one row of tokens is None"),
        pytest.param(dict.fromkeys(range(ROWS), [0] * 14 + [None]), id="one token is None"),
    ],
)
def test_a_version_that_is_missing_is_unknown_and_not_the_newest(tmp_path, told):
    trainer = GRPOTrainer()
    original = trainer._generate_and_score_completions

    def some(inputs):
        output = original(inputs)
        for place, version in told.items():
            inputs[place]["weight_version"] = version
        return output

    trainer._generate_and_score_completions = some
    watch = attach(trainer, archive=tmp_path)
    trainer.step()
    assert {reason.code for reason in watch.last.reasons if reason.bad} == {"version-unknown"}
    assert watch.kept_back == 1
    with ArchiveReader(tmp_path) as archive:
        (entry,) = archive.entries()
        assert len(archive.read(entry).rollouts) == ROWS


def test_completions_that_were_masked_do_not_stand_in_the_way(tmp_path):
    trainer = GRPOTrainer(nats=0.3)
    original = trainer._generate_and_score_completions

    def truncated(inputs):
        output = original(inputs)
        output["completion_mask"][: trainer.masked] = 0
        return output

    trainer._generate_and_score_completions = truncated
    watch = attach(trainer, archive=tmp_path)
    trainer.masked = 2
    trainer.step()
    assert (watch.last.state, watch.last.sequences) == (State.QUARANTINE, ROWS - 2)
    trainer.masked = ROWS
    trainer.step()
    assert {reason.code for reason in watch.last.reasons if reason.bad} == {"nothing-to-judge"}


def test_environments_are_told_apart():
    rows_of = [{"environment": "maths"}, {"environment": "code"}]
    found = groups_of(rows_of, [[1, 2], [1, 2]])
    assert found["environment"] == ["maths", "code"]
    assert found["prompt"][0] == found["prompt"][1] != groups_of([{}], [[1, 3]])["prompt"][0]
    assert "environment" not in groups_of([{}, rows_of[0]], [[1], [2]])


def test_bad_batches_are_archived_with_their_ids(tmp_path):
    trainer = GRPOTrainer(nats=0.3)
    attach(trainer, archive=tmp_path / "archive")
    output, _, _ = trainer.step()
    with ArchiveReader(tmp_path / "archive") as reader:
        (entry,) = reader.entries()
        batch = reader.read(entry)
    assert batch.state == "quarantine"
    assert len(batch.rollouts) == ROWS
    assert list(batch.rollouts[3].prompt_token_ids) == [3, 3]
    assert list(batch.rollouts[0].token_ids) == output["completion_ids"][0, :15].tolist()
    assert list(batch.rollouts[1].old_logprobs) == pytest.approx(trainer.trainer_logprobs[1].tolist())


@pytest.mark.parametrize(("more", "stated"), [(None, True), ({"num_beams": 2}, False)])
def test_an_archive_knows_how_the_tokens_were_drawn_where_the_trainer_says(tmp_path, more, stated):
    """Without it blame takes a temperature of 1, and raw logprobs for right."""
    trainer = GRPOTrainer(nats=0.3)
    trainer.args.generation_kwargs = more
    attach(trainer, archive=tmp_path)
    trainer.step()
    with ArchiveReader(tmp_path) as reader:
        (entry,) = reader.entries()
        rollout = reader.read(entry).rollouts[0]
    assert set(rollout.stated) == (set(SHAPING) if stated else set())
    assert rollout.sampling.temperature == (0.7 if stated else 1.0)


def test_a_training_that_begins_again_is_followed(caplog):
    trainer = GRPOTrainer()
    watch = attach(trainer)
    for _ in range(3):
        trainer.step()
    trainer.state.global_step = 1
    with caplog.at_level(logging.WARNING):
        watch._callback.on_train_begin(trainer.args, trainer.state, SimpleNamespace())
    assert len(caplog.records) == 1
    trainer.step()
    assert watch.last.step == 1


@pytest.mark.parametrize(
    ("accumulated", "per_generation", "iterations", "steps"),
    [
        (1, 1, 1, [0, 1, 2, 3, 4, 5]),
        (2, 2, 2, [0, 2, 4]),
        (4, 1, 1, [*range(24)]),
        (4, 2, 1, [*range(12)]),
        (3, 2, 1, [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        (4, 3, 1, [0, 1, 2, 4, 6, 7, 8, 10]),
        (5, 2, 1, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16]),
        (8, 3, 1, [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16]),
    ],
)
def test_steps_only_rise_however_trl_generates(accumulated, per_generation, iterations, steps):
    """Of six steps, by TRL 1.16's own schedule."""
    trainer = GRPOTrainer()
    trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation = accumulated, per_generation
    trainer.num_iterations = iterations
    watch = attach(trainer)
    seen = []
    for micro in range(6 * accumulated):
        trainer.state.global_step = micro // accumulated
        if micro % (per_generation * iterations) == 0:
            trainer._generate_and_score_completions([{"prompt": str(place // 4)} for place in range(ROWS)])
            seen.append(watch.last.step)
    assert seen == steps


def test_a_training_that_goes_on_is_not_set_back(caplog):
    """Steps of two generations each: what was seen is no step that is yet to come."""
    trainer = GRPOTrainer()
    trainer.args.gradient_accumulation_steps = 2
    watch = attach(trainer)
    for _ in range(2):
        trainer._generate_and_score_completions([{"prompt": str(place // 4)} for place in range(ROWS)])
        trainer.step()
    with caplog.at_level(logging.WARNING):
        watch._callback.on_train_begin(trainer.args, trainer.state, SimpleNamespace())
    assert not caplog.records
    trainer.step()
    assert watch.last.step == 4


def test_sinks_get_every_decision_and_are_closed():
    seen = []
    sink = SimpleNamespace(emit=seen.append, close=lambda: seen.append("closed"))
    trainer = GRPOTrainer()
    with attach(trainer, sinks=[sink]) as watch:
        trainer.step()
    assert seen == [watch.last, "closed"]


def test_detach_leaves_nothing_behind():
    trainer = GRPOTrainer(nats=0.3)
    before = dict(vars(trainer))
    watch = attach(trainer)
    watch.detach()
    watch.detach()
    assert vars(trainer) == before
    assert trainer.callbacks == []
    assert trainer.step()[1]


def test_detach_closes_the_monitor_that_attach_made_and_no_other(tmp_path):
    trainer = GRPOTrainer()
    for _ in range(2):
        with attach(trainer, directory=tmp_path / "run"):
            trainer.step()
    theirs = Monitor(directory=tmp_path / "theirs")
    attach(GRPOTrainer(), theirs).detach()
    assert theirs.trigger_alert().state is State.QUARANTINE


def test_a_trainer_that_is_refused_leaves_no_monitor_behind(tmp_path):
    trainer = GRPOTrainer()
    trainer.is_deepspeed_enabled = True
    with pytest.raises(InvalidValue):
        attach(trainer, directory=tmp_path)
    Monitor(directory=tmp_path).close()


def test_what_nobody_reports_is_not_kept():
    trainer = GRPOTrainer()
    watch = attach(trainer, report=False)
    for _ in range(3):
        trainer.step()
    assert watch._window.take() == {}


def test_a_second_watch_and_a_wrapper_on_top_are_refused():
    trainer = GRPOTrainer()
    watch = attach(trainer)
    with pytest.raises(InvalidValue):
        attach(trainer)
    mine = trainer.log
    trainer.log = partial(mine)
    with pytest.raises(InvalidValue) as refused:
        watch.detach()
    assert "log" in str(refused.value)
    trainer.log = mine
    watch.detach()


@pytest.mark.parametrize("name", sorted({*WRAPPED, "_get_per_token_logps_and_entropies", "rollout_func"}))
def test_a_trainer_that_lacks_something_is_refused_by_its_name(name):
    class Bare:
        pass

    kept = {each: getattr(GRPOTrainer(), each) for each in (*WRAPPED, *READ) if each != name}
    kind = type("GRPOTrainer", (), {**kept, "__module__": "trl.trainer.grpo_trainer"})
    with pytest.raises(InvalidValue) as refused:
        attach(kind())
    assert re.search(rf"lacks {name};", str(refused.value))
    with pytest.raises(InvalidValue):
        attach(Bare())


@pytest.mark.parametrize("version", ["1.12.0", "1.17.0", "2.0", "0.29.1", "1.16.0.dev0"])
def test_an_unknown_release_is_refused_by_its_name(version, monkeypatch):
    monkeypatch.setattr(trl_checks, "trl_version", lambda: version)
    with pytest.raises(InvalidValue) as refused:
        attach(GRPOTrainer())
    assert version in str(refused.value)


def test_trl_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.undo()

    def nowhere(_):
        raise trl_checks.metadata.PackageNotFoundError

    monkeypatch.setattr(trl_checks.metadata, "version", nowhere)
    with pytest.raises(MissingExtra):
        attach(GRPOTrainer())


def test_the_extra_has_the_releases_that_are_known():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    low, high = re.search(r'"trl>=1\.(\d+),<1\.(\d+)"', text).groups()
    assert [f"1.{minor}" for minor in range(int(low), int(high))] == list(KNOWN)


@pytest.mark.parametrize(
    "change",
    [
        {"use_transformers_continuous_batching": True},
        {"is_deepspeed_enabled": True},
        {"max_completion_length": 10**8},
        {"fp16": True, "max_grad_norm": 0.0},
    ],
)
def test_what_cannot_be_watched_is_refused(change):
    trainer = GRPOTrainer()
    trainer.rollout_func = None
    for name, value in change.items():
        setattr(trainer.args if hasattr(trainer.args, name) else trainer, name, value)
    with pytest.raises(InvalidValue):
        attach(trainer)
    assert "_generate_and_score_completions" not in vars(trainer)


class Deaf:
    def close(self): ...


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("monitor", {"monitor": "runs/train"}),
        ("monitor", {"monitor": MonitoringConfig()}),
        ("sinks", {"sinks": Deaf()}),
        ("sinks", {"sinks": "steps.jsonl"}),
        ("sinks", {"sinks": [Deaf()]}),
        ("sinks", {"sinks": iter([])}),
    ],
)
def test_what_is_no_monitor_and_no_sink_is_refused_before_anything_is_wrapped(name, given):
    """The second argument is a monitor, and a directory in its place is an easy slip."""
    trainer = GRPOTrainer()
    with pytest.raises(InvalidValue, match=name):
        attach(trainer, **given)
    attach(trainer).detach()


def test_an_archive_beside_a_monitor_is_refused(tmp_path):
    with pytest.raises(InvalidValue):
        attach(GRPOTrainer(), Monitor(), tmp_path)


def test_generate_leaves_the_logprobs_of_its_tokens():
    torch.manual_seed(0)
    scores = torch.randn(3, 2, 7)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    calls = []

    class Model:
        def generate(self, input_ids, generation_config):
            calls.append(generation_config)
            return SimpleNamespace(sequences=torch.cat([input_ids, tokens], dim=1), scores=tuple(scores))

    model = Model()
    config = SimpleNamespace(output_scores=False)
    with recorded(model) as found:
        sequences = model.generate(input_ids=torch.zeros(2, 4, dtype=torch.long), generation_config=config)
    assert "generate" not in vars(model)
    assert sequences.shape == (2, 7)
    assert calls[0].output_scores
    assert not config.output_scores
    kept = rows(found, [[1, 2, 3], [4]])
    expected = scores.log_softmax(-1)
    assert kept[0] == pytest.approx(
        [float(expected[place, 0, token]) for place, token in enumerate([1, 2, 3])]
    )
    assert kept[1] == pytest.approx([float(expected[0, 1, 4])])


def test_the_extra_forward_draws_nothing_from_the_trainings_numbers():
    trainer = GRPOTrainer()
    output = trainer.step()[0]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (torch.rand(ROWS, TOKENS), None, None)
    torch.manual_seed(3)
    old_logprobs(trainer, output)
    first = torch.rand(1)
    torch.manual_seed(3)
    assert first == torch.rand(1)


def test_ranks_see_each_others_bytes():
    pieces = [b"one", b"longer"]

    class Two:
        device = torch.device("cpu")

        def pad_across_processes(self, payload, dim):
            return torch.nn.functional.pad(payload, (0, 6 - len(payload)))

        def gather(self, mine):
            if mine.ndim == 1:
                return torch.tensor([len(piece) for piece in pieces])
            return torch.stack(
                [torch.tensor(list(piece.ljust(6, b"\0")), dtype=torch.uint8) for piece in pieces]
            )

    assert gather_of(Two())(b"one") == pieces


def test_the_worst_of_all_ranks_decides():
    trainer = GRPOTrainer()
    watch = attach(trainer)
    trainer.accelerator = SimpleNamespace(
        num_processes=2,
        process_index=0,
        device=torch.device("cpu"),
        gather=lambda mine: torch.cat([mine, mine + 2]),
    )
    trainer._calculate_rewards = lambda *_: torch.zeros(2 * ROWS, 2)
    _, stepped, _ = trainer.step()
    assert watch.last.state is State.OK
    assert not stepped
    assert watch.kept_back == 1


def test_what_is_kept_back_reaches_no_loss():
    output = {
        "advantages": torch.full((2,), torch.nan),
        "completion_mask": torch.ones(2, 3),
        "tool_mask": torch.ones(2, 3),
        "old_per_token_logps": torch.full((2, 3), torch.nan),
        "importance_sampling_ratio": torch.full((2, 1), torch.nan),
        "ref_per_token_logps": torch.zeros(2, 3),
    }
    keep_back(output)
    assert not any(value.isnan().any() for value in output.values())
    assert not loss_mask(output).any()

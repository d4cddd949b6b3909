"""`attach` on TRL's own GRPOTrainer, with a testbed model on the CPU. Skipped where TRL is not installed.

pip install 'zerodrift[trl]' datasets, then: pytest -m trl tests/contract/test_trl_real.py
"""

import dataclasses
import warnings

import pytest
import torch

from zerodrift import models
from zerodrift.doctor.tables import trl_keys
from zerodrift.integrations.metrics import MEANINGS, PREFIX
from zerodrift.integrations.sinks.jsonl import Jsonl
from zerodrift.integrations.trl import OWN, TRL_NAMES, attach
from zerodrift.monitor.decision import Measured, State
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.writer import Writer, writer_of
from zerodrift.records.archive.reader import ArchiveReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'zerodrift[trl]'")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default")]

SPEC = "testbed:qwen3"
TEMPERATURE = 0.7


def reward(completions, **_):
    return [len(set(text)) / 10 for text in completions]


@pytest.fixture
def made(tmp_path):
    """A trainer; what it is given replaces or adds to small settings that run in a second a step."""

    def make(rollout_func=None, model=None, **settings):
        torch.manual_seed(0)
        tokenizer = models.tokenizer(SPEC)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        args = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 32,
            "max_steps": 3,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "save_strategy": "no",
            # With it a model in training mode keeps no cache, and a plain `generate` in a rollout_func draws nonsense.
            "gradient_checkpointing": False,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "temperature": TEMPERATURE,
            "disable_tqdm": True,
            "seed": 1,
        }
        return trl.GRPOTrainer(
            model=models.load(SPEC) if model is None else model,
            reward_funcs=reward,
            args=trl.GRPOConfig(**{**args, **settings}),
            train_dataset=datasets.Dataset.from_dict({"prompt": [f"count to {n}" for n in range(10, 74)]}),
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )

    return make


class Engine:
    """A rollout_func over the trainer's own weights; `wrong` says what is wrong with the logprobs of a generation."""

    def __init__(self, wrong):
        self.wrong, self.calls, self.before = wrong, -1, []

    def __call__(self, prompts, trainer):
        self.calls += 1
        self.before.append(weights(trainer))
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        given = torch.tensor(prompt_ids)
        with torch.no_grad():
            answer = trainer.model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                generation_config=trainer.generation_config,
                return_dict_in_generate=True,
                output_scores=True,
            )
        scores = torch.stack(answer.scores, dim=1).float()
        if self.wrong(self.calls) == "raw":
            scores = scores * TEMPERATURE  # what vLLM reports unless it is told otherwise
        drawn = answer.sequences[:, given.shape[1] :]
        found = scores.log_softmax(-1).gather(2, drawn[..., None])[..., 0].tolist()
        if self.wrong(self.calls) == "nan":
            found[0][1] = None  # TRL makes NaN of it, and a ratio of 1
        ids = [self.until_end(row, trainer.processing_class.eos_token_id) for row in drawn.tolist()]
        logprobs = [row[: len(tokens)] for row, tokens in zip(found, ids, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs}

    @staticmethod
    def until_end(tokens, end):
        return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "zerodrift/state" in entry]


def test_watching_a_healthy_training_changes_no_bit_of_it(made, tmp_path):
    plain = made()
    plain.train()
    watched = made()
    before = weights(watched)
    with attach(watched, Monitor(precision="fp32"), sinks=[Jsonl(tmp_path / "z.jsonl")]) as watch:
        watched.train()
    assert not same(before, weights(watched))
    assert same(weights(plain), weights(watched))
    assert (watch.last.state, watch.last.step, watch.kept_back) == (State.OK, 2, 0)
    assert isinstance(watch.last.mismatch, Measured)
    assert 0 < watch.last.mismatch.mean_abs < 1e-5, "two ways through the same model in fp32"
    entries = logged(watched)
    assert len(entries) == 3
    known = {PREFIX + name for name in {**MEANINGS, **OWN}} | set(TRL_NAMES)
    assert {name for name in entries[0] if name.startswith(("zerodrift/", "sampling/"))} <= known
    assert entries[0]["sampling/sampling_logp_difference/mean"] == entries[0]["zerodrift/mismatch/mean_abs"]
    assert entries[0]["zerodrift/reward/mean"] == pytest.approx(entries[0]["reward"])
    assert len((tmp_path / "z.jsonl").read_text().splitlines()) == 3


def test_a_page_hears_that_the_training_is_over_while_its_process_lives_on(made, tmp_path):
    trainer = made(max_steps=1)
    with attach(trainer, directory=tmp_path / "watched") as watch:
        assert writer_of(tmp_path / "watched") is Writer.WRITING
        trainer.train()
        assert writer_of(tmp_path / "watched") is Writer.ENDED
    watch.monitor.close()


def test_it_can_be_detached_and_nothing_is_left(made):
    trainer = made(max_steps=1)
    attach(trainer).detach()
    trainer.train()
    assert not logged(trainer)
    assert "generate" not in vars(trainer.model)


def test_a_rollout_func_with_honest_logprobs_is_quiet(made):
    trainer = made(Engine(lambda _: None))
    watch = attach(trainer, Monitor(precision="fp32"))
    trainer.train()
    assert (watch.last.state, watch.kept_back) == (State.OK, 0)
    assert trainer.state.global_step == 3


def test_raw_logprobs_are_quarantined_move_no_weight_and_halt(made, tmp_path):
    """Momentum, weight decay and a KL term all move weights that have no advantage: none of them may."""
    engine = Engine(lambda call: "raw" if call >= 1 else None)
    directory = str(
        models.materialise(SPEC, tmp_path / "model")
    )  # TRL loads the reference of the KL by its name
    trainer = made(engine, directory, max_steps=10, beta=0.1, model_init_kwargs={"dtype": "float32"})
    watch = attach(trainer, archive=tmp_path / "archive")
    trainer.train()
    assert trainer.state.global_step == 4
    assert (watch.last.state, watch.kept_back) == (State.HALT, 3)
    assert not same(engine.before[0], engine.before[1]), "the honest batch was trained on"
    assert same(engine.before[1], engine.before[2])
    assert same(engine.before[1], weights(trainer))
    assert [entry["zerodrift/state"] for entry in logged(trainer)] == [0, 2, 2, 3]
    with ArchiveReader(tmp_path / "archive") as reader:
        batches = [reader.read(entry) for entry in reader.entries()]
    assert [batch.state for batch in batches if batch.step] == ["quarantine", "quarantine", "halt"]
    assert all(len(batch.rollouts) == 8 for batch in batches)


def test_the_same_without_a_watch_is_trained_on(made):
    """What the test before would look like if nothing were wrapped."""
    engine = Engine(lambda call: "raw" if call >= 1 else None)
    trainer = made(engine)
    trainer.train()
    assert not same(engine.before[1], engine.before[2])


def test_a_logprob_that_is_missing_is_not_made_a_ratio_of_1(made):
    engine = Engine(lambda call: "nan" if call == 1 else None)
    trainer = made(engine)
    watch = attach(trainer, Monitor(precision="fp32"))
    trainer.train()
    assert watch.kept_back == 1
    assert same(engine.before[1], engine.before[2])
    assert not same(engine.before[2], weights(trainer)), "training goes on afterwards"
    assert all(value.isfinite().all() for value in weights(trainer).values())


def test_a_step_of_one_good_and_one_bad_batch_is_that_of_the_good_one(made):
    """With accumulation over two generations: the bad one adds nothing, so the other's advantages alone decide."""
    settings = {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
        "max_steps": 1,
        "loss_type": "grpo",
    }
    found = []
    for wrong in (lambda call: "raw" if call == 1 else None, lambda _: None):
        trainer = made(Engine(wrong), **settings)
        watch = attach(trainer, Monitor(precision="fp32"))
        trainer.train()
        found.append((watch.kept_back, watch.last.step, weights(trainer)))
    assert [(kept_back, step) for kept_back, step, _ in found] == [(1, 1), (0, 1)]
    assert not same(found[0][2], found[1][2])


def test_a_training_resumed_from_a_checkpoint_goes_on(made, tmp_path):
    state = tmp_path / "monitor.json"
    first = made(max_steps=2, save_strategy="steps", save_steps=1)
    with attach(first, Monitor(precision="fp32", path=state)):
        first.train()
    second = made(max_steps=3)
    watch = attach(second, Monitor(precision="fp32", path=state))
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert (watch.last.step, watch.last.state) == (2, State.OK)
    assert watch.monitor.remembered.observed == 4


def test_several_passes_over_one_generation_are_one_batch(made):
    trainer = made(num_iterations=2, max_steps=4)
    watch = attach(trainer, Monitor(precision="fp32"))
    trainer.train()
    assert watch.monitor.remembered.observed == 2
    assert watch.last.step == 2


def test_tensorboard_gets_the_numbers_through_report_to(made, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = made(report_to="tensorboard")
    attach(trainer, Monitor(precision="fp32"))
    trainer.train()
    (file,) = (tmp_path / "out").rglob("events.out*")
    found = events.EventAccumulator(str(file.parent))
    found.Reload()
    assert [event.step for event in found.Scalars("train/zerodrift/mismatch/mean_abs")] == [1, 2, 3]


def test_the_keys_of_a_trl_file_are_those_that_trl_reads():
    """By them the doctor tells a mistyped key from one that says nothing of drift."""
    from trl.scripts.grpo import GRPOScriptArguments

    read = (trl.GRPOConfig, trl.ModelConfig, GRPOScriptArguments, trl.DatasetMixtureConfig)
    assert set(trl_keys()) == {field.name for each in read for field in dataclasses.fields(each)} | {"env"}

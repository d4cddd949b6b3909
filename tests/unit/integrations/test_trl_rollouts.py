"""A `rollout_func` over an engine, with stand-ins for both sides; the real ones are in tests/engines/test_vllm_trl.py."""

from types import SimpleNamespace

import pytest

from zerodrift import models
from zerodrift.backends.base import Capability
from zerodrift.backends.exact import ExactBackend
from zerodrift.core.completion import Answer, Completion, FinishReason, LogprobKind, Problem
from zerodrift.core.errors import CapabilityMissing, EngineError, InvalidValue
from zerodrift.core.request import SHAPING, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.integrations.trl_batch import VERSION_FIELD
from zerodrift.integrations.trl_rollouts import EngineRollouts
from zerodrift.integrations.trl_sampling import drawn_with

ALL = frozenset(
    {
        Capability.LOAD_WEIGHTS,
        Capability.CACHE_SALT,
        Capability.RESET_CACHE,
        Capability.WEIGHT_VERSION,
    }
)


class Engine:
    """Answers every request with two tokens, under the label that it was given last."""

    name = "stand-in"

    def __init__(self, capabilities=ALL):
        self.capabilities = capabilities
        self.label, self.asked, self.loaded, self.resets, self.problems = "default", [], [], 0, ()

    def load_weights(self, directory, version):
        assert (directory / "model.safetensors").is_file()
        assert directory.stat().st_mode & 0o055 == 0o055
        self.loaded.append(directory)
        self.label = version.label

    def reset_cache(self):
        self.resets += 1

    def generate(self, requests):
        self.asked.append(requests)
        return [Answer(() if self.problems else (self._made(each),), self.problems) for each in requests]

    def _made(self, request):
        return Completion(
            prompt_token_ids=request.prompt.token_ids,
            token_ids=(7, 8),
            logprobs=(-0.5, -0.25),
            kind=LogprobKind.PROCESSED,
            sampling=request.sampling,
            finish_reason=FinishReason.LENGTH,
            versions=(VersionSpan(WeightVersion(self.label), 0, 2),),
            fingerprint="",
        )


@pytest.fixture(scope="module")
def model():
    return models.load("testbed:qwen3")


@pytest.fixture
def trainer(model):
    return SimpleNamespace(
        args=SimpleNamespace(
            temperature=0.7,
            top_p=0.9,
            top_k=-1,
            min_p=None,
            repetition_penalty=1.0,
            generation_kwargs=None,
            max_completion_length=5,
        ),
        accelerator=SimpleNamespace(num_processes=1, unwrap_model=lambda model: model),
        eos_token_ids=[2],
        model=model,
        state=SimpleNamespace(global_step=3),
        _tokenize_prompts=lambda prompts: ([[1, len(each)] for each in prompts], None, {}),
    )


def test_it_asks_with_the_trainers_parameters_and_says_whose_weights_drew(trainer, tmp_path):
    engine = Engine()
    made = EngineRollouts(engine, tmp_path / "x")(["a", "bcd"], trainer)
    assert made == {
        "prompt_ids": [[1, 1], [1, 3]],
        "completion_ids": [[7, 8]] * 2,
        "logprobs": [[-0.5, -0.25]] * 2,
        VERSION_FIELD: [[3, 3]] * 2,
    }
    [[first, _]] = engine.asked
    assert first.sampling == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5, stop_token_ids=(2,))
    assert list((tmp_path / "x").iterdir()) == []


def test_weights_go_there_once_for_each_step_and_each_has_its_salt(trainer, tmp_path):
    engine = Engine()
    rollouts = EngineRollouts(engine, tmp_path)
    for step in (0, 0, 1):
        trainer.state.global_step = step
        rollouts(["a"], trainer)
    salts = [requests[0].prompt.cache_salt for requests in engine.asked]
    assert len(engine.loaded) == 2
    assert salts[0] == salts[1] != salts[2]
    assert engine.resets == 0


def test_a_training_that_starts_again_at_the_same_step_sends_its_weights(trainer, tmp_path):
    """One step was trained, and the next training begins at 0 too, with other weights."""
    engine = Engine()
    rollouts = EngineRollouts(engine, tmp_path)
    for _ in range(2):
        trainer.state = SimpleNamespace(global_step=0)
        rollouts(["a"], trainer)
    assert len(engine.loaded) == 2


def test_without_salts_the_cache_is_reset(trainer, tmp_path):
    engine = Engine(ALL - {Capability.CACHE_SALT})
    EngineRollouts(engine, tmp_path)(["a"], trainer)
    assert engine.resets == 1
    assert engine.asked[0][0].prompt.cache_salt is None


def test_an_update_that_failed_is_sent_again(trainer, tmp_path):
    engine = Engine(ALL - {Capability.CACHE_SALT})
    rollouts = EngineRollouts(engine, tmp_path)

    def busy():
        raise EngineError("requests still hold cached blocks")

    engine.reset_cache = busy
    with pytest.raises(EngineError):
        rollouts(["a"], trainer)
    del engine.reset_cache
    rollouts(["a"], trainer)
    assert len(engine.loaded) == 2


def test_a_server_that_started_anew_has_weights_that_nobody_knows(trainer, tmp_path):
    engine = Engine()
    rollouts = EngineRollouts(engine, tmp_path)
    rollouts(["a"], trainer)
    engine.label = "default"
    assert rollouts(["a"], trainer)[VERSION_FIELD] == [None]


def test_a_server_without_labels_has_what_was_sent(trainer, tmp_path):
    engine = Engine(ALL - {Capability.WEIGHT_VERSION})
    engine.load_weights = lambda *_: None
    assert EngineRollouts(engine, tmp_path)(["a"], trainer)[VERSION_FIELD] == [[3, 3]]


@pytest.mark.parametrize(
    "missing", [{Capability.LOAD_WEIGHTS}, {Capability.CACHE_SALT, Capability.RESET_CACHE}]
)
def test_an_engine_that_would_draw_from_old_weights_is_refused(missing, tmp_path):
    with pytest.raises(CapabilityMissing):
        EngineRollouts(Engine(ALL - missing), tmp_path)


def test_what_cannot_be_done_rightly_is_refused(trainer, tmp_path):
    engine = Engine()
    rollouts = EngineRollouts(engine, tmp_path)
    trainer.args.generation_kwargs = {"num_beams": 2}
    with pytest.raises(InvalidValue):
        rollouts(["a"], trainer)
    trainer.args.generation_kwargs = None
    trainer.accelerator.num_processes = 2
    with pytest.raises(InvalidValue):
        rollouts(["a"], trainer)
    trainer.accelerator.num_processes = 1
    trainer._tokenize_prompts = lambda prompts: ([[1]], ["image"], {})
    with pytest.raises(InvalidValue):
        rollouts(["a"], trainer)
    del trainer._tokenize_prompts
    with pytest.raises(InvalidValue):
        rollouts(["a"], trainer)
    assert not engine.loaded


def test_an_answer_that_cannot_be_read_is_not_left_out(trainer, tmp_path):
    engine = Engine()
    engine.problems = (Problem("engine/non-finite", "NaN"),)
    with pytest.raises(EngineError):
        EngineRollouts(engine, tmp_path)(["a"], trainer)


def test_the_weights_that_arrive_are_the_trainers(trainer, tmp_path):
    """Through an engine that computes: its numbers move with the trainer's model, and only with it."""
    torch = pytest.importorskip("torch")
    trainer.model = models.load("testbed:qwen3")
    trainer.args.temperature, trainer.args.top_p = 1.0, 1.0
    engine = ExactBackend("testbed:qwen3")
    rollouts = EngineRollouts(engine, tmp_path)

    def off():
        made = rollouts(["a"], trainer)
        ids = torch.tensor([made["prompt_ids"][0] + made["completion_ids"][0]])
        with torch.no_grad():
            logprobs = trainer.model(ids).logits[0].float().log_softmax(-1)
        told, drawn = made["logprobs"][0], made["completion_ids"][0]
        first = len(made["prompt_ids"][0]) - 1
        return max(
            abs(logprobs[first + place, token].item() - told[place]) for place, token in enumerate(drawn)
        )

    assert off() < 1e-4
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.3)
    assert off() > 1e-2, "the step is the same, so nothing was sent"
    trainer.state.global_step += 1
    assert off() < 1e-4


def test_parameters_of_generation_kwargs_count(trainer):
    trainer.args.generation_kwargs = {"top_k": 20, "frequency_penalty": 0.5}
    found = drawn_with(trainer)
    assert (found.top_k, found.frequency_penalty, found.min_p) == (20, 0.5, 0.0)
    trainer.args.generation_kwargs = {"num_beams": 2}
    assert drawn_with(trainer) is None
    assert {"top_k", "frequency_penalty"} <= {*SHAPING}

"""Adapters come and go between two steps; what exact mode cannot run is refused by name, and nothing changes."""

import copy
import json
import threading
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from zerodrift import exact
from zerodrift.core.errors import (
    AdapterInUse,
    DuplicateAdapter,
    InvalidValue,
    ModelError,
    NonFinite,
    UnknownAdapter,
    UnsupportedModel,
    ZerodriftError,
)
from zerodrift.core.request import SamplingParams
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.updates import Updates
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.of_model import update_of

QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
PARAMS = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)


def with_lora(base: Any, **options: Any) -> Any:
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """As peft writes one."""
    path = tmp_path_factory.mktemp("adapter")
    with_lora(tiny).save_pretrained(path)
    return path


def first(model):
    return model.get_base_model().model.layers[0].self_attn.q_proj


def edited(folder, target, config=(), tensors=lambda state: state):
    """A copy of an adapter's directory in which something is changed."""
    written = json.loads((folder / "adapter_config.json").read_text()) | dict(config)
    (target / "adapter_config.json").write_text(json.dumps(written))
    save_file(tensors(load_file(folder / "adapter_model.safetensors")), target / "adapter_model.safetensors")
    return target


def filled(part, value):
    return lambda state: {
        name: torch.full_like(each, value) if part in name else each for name, each in state.items()
    }


def renamed(old, new):
    return lambda state: {name.replace(old, new): each for name, each in state.items()}


@pytest.mark.parametrize(
    ("config", "tensors", "error"),
    [
        ({"r": 0}, dict, UnsupportedModel),
        ({"r": 4}, dict, ModelError),
        ({"use_dora": True}, dict, UnsupportedModel),
        ({"bias": "all"}, dict, UnsupportedModel),
        ({"init_lora_weights": "pissa"}, dict, UnsupportedModel),
        ({"alpha_pattern": {"q_proj": 3}}, dict, UnsupportedModel),
        ({"some_new_variant": True}, dict, UnsupportedModel),
        ({"peft_type": "IA3"}, dict, UnsupportedModel),
        ({"lora_alpha": "many"}, dict, ModelError),
        ({}, filled("lora_A", float("nan")), ModelError),
        ({}, filled("lora_B", 1e38), NonFinite),
        ({}, renamed("q_proj", "z_proj"), UnsupportedModel),
        ({}, renamed("model.layers.0.self_attn.q_proj", "lm_head"), UnsupportedModel),
        ({}, renamed("q_proj", "k_proj"), ModelError),
        ({}, renamed("layers.1.", "layers.7."), UnsupportedModel),
        ({}, lambda state: state | {f"{QUERY}.lora_magnitude_vector": torch.ones(32)}, UnsupportedModel),
        ({}, lambda state: {name: each.bfloat16() for name, each in state.items()}, UnsupportedModel),
        ({}, lambda state: dict(list(state.items())[1:]), ModelError),
        ({}, lambda _: {}, ModelError),
    ],
)
def test_what_is_no_plain_lora_of_this_model_is_refused(engine, folder, tmp_path, config, tensors, error):
    before = engine.fingerprint()
    with pytest.raises(error) as refused:
        engine.load_adapter("a", edited(folder, tmp_path, config, tensors))
    assert type(refused.value) is error
    assert engine.adapters.versions == ()
    assert engine.fingerprint() == before
    with pytest.raises(UnknownAdapter):
        engine.generate([[5, 6]], PARAMS, lora="a")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("",), InvalidValue),
        ((7,), InvalidValue),
        (("a", 3), InvalidValue),
        (("a", "/nowhere"), InvalidValue),
        (("a", {}), InvalidValue),
        (("a", {"x": torch.ones(1)}, {"peft_type": "LORA", "r": 1, "lora_alpha": 1}), UnsupportedModel),
    ],
)
def test_what_is_no_adapter_is_refused(engine, arguments, error):
    with pytest.raises(error):
        engine.load_adapter(*arguments)


def test_a_trainer_with_another_base_is_refused(engine, tiny):
    trainer = with_lora(tiny)
    with torch.no_grad():
        trainer.get_base_model().lm_head.weight[0, 0] += 1
    with pytest.raises(ModelError):
        engine.load_adapter("a", trainer)
    engine.load_adapter("a", with_lora(tiny))


def test_digests_cover_base_tensors_and_scale(engine_of, tiny, folder, tmp_path):
    digests = set()
    for number, changes in enumerate([{}, {"lora_alpha": 5}, {"use_rslora": True}]):
        target = tmp_path / str(number)
        target.mkdir()
        digests.add(engine_of().load_adapter("a", edited(folder, target, changes)).digest)
    engine = engine_of()
    same = engine.load_adapter("a", with_lora(tiny))
    assert same.digest in digests
    engine.unload_adapter("a")
    with torch.no_grad():
        state = {name: tensor + 0.5 for name, tensor in checkpoint_state(tiny).items()}
    engine.swap_weights(state, "other base")
    digests.add(engine.load_adapter("a", folder).digest)
    assert len(digests) == 4


def test_one_that_is_in_use_stays(engine, folder):
    engine.load_adapter("a", folder)
    with pytest.raises(DuplicateAdapter):
        engine.load_adapter("a", folder)
    engine.add_request([5, 6, 7], PARAMS, lora="a", request_id="r")
    engine.step()
    with pytest.raises(AdapterInUse):
        engine.unload_adapter("a")
    (update,) = engine.abort("r")
    assert update.output.lora == engine.adapters.versions[0]
    engine.unload_adapter("a")
    for ask in (lambda: engine.generate([[5]], PARAMS, lora="a"), lambda: engine.unload_adapter("a")):
        with pytest.raises(UnknownAdapter):
            ask()


def test_a_name_is_free_at_once_where_requests_keep_what_they_have(engine_of, tiny, folder):
    """Whoever began with the first adapter ends with it, while the second has its name; then its memory is given back."""
    other = with_lora(tiny, r=1)
    alone = {}
    for key, source in (("first", folder), ("second", other)):
        engine = engine_of()
        engine.load_adapter("a", source)
        (alone[key],) = engine.generate([[5, 6, 7]], PARAMS, lora="a")
    assert alone["first"].logprobs != alone["second"].logprobs

    engine = engine_of()
    first = engine.load_adapter("a", folder)
    engine.add_request([5, 6, 7], PARAMS, lora="a", request_id="old")
    engine.step()
    with pytest.raises(InvalidValue):
        engine.unload_adapter("a", in_use="drop")
    second = engine.load_adapter("a", other, replace=True, most=2)
    assert engine.adapters.versions == (second,)
    engine.add_request([5, 6, 7], PARAMS, lora="a", request_id="new")
    engine.step()
    engine.unload_adapter("a", in_use="keep")
    assert engine.adapters.versions == ()
    with pytest.raises(UnknownAdapter):
        engine.generate([[5]], PARAMS, lora="a")
    with pytest.raises(AdapterInUse):  # two are held by requests
        engine.load_adapter("b", folder, most=2)
    with pytest.raises(AdapterInUse):
        engine.swap_weights(checkpoint_state(tiny), "next")
    ended = {}
    while engine.has_unfinished:
        ended |= {each.request_id: each.output for each in engine.step() if each.output is not None}
    assert (ended["old"].lora, ended["new"].lora) == (first, second)
    assert ended["old"].logprobs == alone["first"].logprobs
    assert ended["new"].logprobs == alone["second"].logprobs
    engine.swap_weights(checkpoint_state(tiny), "next")
    engine.load_adapter("b", folder, most=1)


@pytest.mark.parametrize("lora", [3, ["a"], ["a", "b", "c"], {"a": 1}, [1, 2]])
def test_names_that_do_not_fit_the_prompts(engine, folder, lora):
    engine.load_adapter("a", folder)
    with pytest.raises(InvalidValue):
        engine.generate([[5], [6]], PARAMS, lora=lora)


def test_the_base_is_not_swapped_below_an_adapter_nor_said_to_be(engine, tiny, folder, tmp_path):
    """Also by `Updates`, whose registry is written right before the swap."""
    first = engine.version
    with EngineLoop(engine) as loop, Updates(loop, tmp_path / "versions") as updates:
        loop.load_adapter("a", folder)
        with updates.begin(update_of(tiny, "next"), expected=first.label) as update:
            for name, tensor in checkpoint_state(tiny).items():
                update.push(name, tensor)
            update.verify()
            update.commit()
            with pytest.raises(AdapterInUse):
                update.publish()
        assert (engine.version, updates.current.label) == (first, first.label)
        loop.unload_adapter("a")


def test_adapters_come_and_go_while_requests_run(engine_of, folder):
    """One whose adapter is unloaded between its check and its turn is told so, and none runs with another's."""
    engine = engine_of()
    (alone,) = engine.generate([[5, 6, 7]], PARAMS)
    with EngineLoop(engine) as loop:
        over, outputs = threading.Event(), []

        def ask() -> None:
            while not over.is_set():
                outputs.extend(loop.submit([5, 6, 7], PARAMS).result())

        client = threading.Thread(target=ask)
        client.start()
        served = []
        for number in range(4):
            loop.load_adapter(f"step-{number}", folder)
            served += loop.submit([5, 6, 7], PARAMS, lora=f"step-{number}").result()
            loop.unload_adapter(f"step-{number}")
        over.set()
        client.join()
    assert {output.logprobs for output in outputs} == {alone.logprobs}
    assert len({output.logprobs for output in served}) == 1
    assert served[0].logprobs != alone.logprobs
    assert [output.lora.name for output in served] == [f"step-{number}" for number in range(4)]


def test_an_engine_takes_a_base_and_not_a_trainer_with_its_adapter(engine_of, tiny):
    trainer = with_lora(tiny)
    for model in (trainer, trainer.get_base_model()):
        with pytest.raises(InvalidValue):
            type(engine_of())(model)


@pytest.mark.parametrize(
    ("options", "spoil"),
    [
        ({"use_dora": True}, None),
        ({"lora_dropout": 0.1}, None),
        (
            {},
            lambda model: setattr(
                first(model).lora_B["default"], "bias", torch.nn.Parameter(torch.zeros(32))
            ),
        ),
        ({"target_modules": ["lm_head"]}, None),
        ({"target_modules": ["embed_tokens"]}, None),
        ({}, lambda model: model.merge_adapter()),
        ({}, lambda model: first(model).lora_A.half()),
        (
            {},
            lambda model: (
                model.add_adapter("b", peft.LoraConfig(r=1, target_modules=["q_proj"])),
                model.base_model.set_adapter(["default", "b"]),
            ),
        ),
    ],
)
def test_what_a_trainer_may_not_have_is_refused_with_its_place(tiny, options, spoil):
    trainer = with_lora(tiny, **options)
    if spoil is not None:
        spoil(trainer)
    with pytest.raises(UnsupportedModel) as refused:
        exact.prepare(trainer)
    assert "_proj" in str(refused.value) or "lm_head" in str(refused.value) or "embed" in str(refused.value)


def test_other_kinds_of_peft_are_refused(tiny):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ZerodriftError):
        exact.prepare(peft.get_peft_model(copy.deepcopy(tiny), config))

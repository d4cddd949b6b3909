"""LoRA in the exact engine: rows of several adapters in one step, each with the bits of the trainer that has it unmerged."""

import random
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift import exact
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.replay import check_replay
from zerodrift.models.testbed_config import CONFIGS

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "vocab_size": 61,
    "num_hidden_layers": 2,
}
TARGETS = {
    "narrow": (["q_proj", "v_proj"], 1, 2),
    "wide": (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], 5, 7),
    "mlp": (["down_proj"], 8, 16),
}


def base_of(family: str = "qwen3") -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = {**CONFIGS[family], **SIZES}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 2 / weight.shape[-1] ** 0.5)
    return model


def adapted(name: str, base: Any) -> Any:
    """A model of peft whose adapter does something."""
    targets, rank, alpha = TARGETS[name]
    config = peft.LoraConfig(target_modules=targets, r=rank, lora_alpha=alpha, use_rslora=name == "mlp")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        model = peft.get_peft_model(base, config).eval()
        with torch.no_grad():
            for place, weight in model.named_parameters():
                if "lora_B" in place:
                    weight.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def trainers() -> dict[str | None, Any]:
    """A prepared model for every adapter, and one without."""
    return {
        None: exact.prepare(base_of()),
        **{name: exact.prepare(adapted(name, base_of())) for name in TARGETS},
    }


@pytest.fixture(scope="module")
def engine(trainers, tmp_path_factory) -> Engine:
    """All adapters loaded: by model, by directory, and by tensors."""
    engine = Engine(
        base_of(), num_blocks=256, block_size=4, max_num_batched_tokens=64, logprob_check_interval=1
    )
    engine.load_adapter("narrow", trainers["narrow"])
    folder = tmp_path_factory.mktemp("adapter")
    trainers["wide"].save_pretrained(folder)
    engine.load_adapter("wide", folder)
    state = peft.get_peft_model_state_dict(trainers["mlp"])
    engine.load_adapter("mlp", state, trainers["mlp"].peft_config["default"])
    return engine


def asked(seed: int, count: int) -> tuple[list[list[int]], list[SamplingParams], list[str | None]]:
    rng = random.Random(seed)
    shared = [rng.randrange(2, 61) for _ in range(12)]
    prompts = [
        shared[: rng.randrange(13)] + [rng.randrange(2, 61) for _ in range(rng.randrange(1, 9))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(max_tokens=rng.randrange(1, 9), seed=number, ignore_eos=True)
        for number in range(count)
    ]
    return prompts, params, [rng.choice([None, *TARGETS]) for _ in range(count)]


def bits(values: Any) -> list[str]:
    return [float(value).hex() for value in values]


@torch.no_grad()
def trainer_bits(model: Any, outputs: list[Any]) -> list[list[str]]:
    return [bits(found.tolist()) for found in exact.token_logprobs(model, outputs)]


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_several_adapters_have_their_trainers_bits(trainers, engine, seed):
    prompts, params, lora = asked(seed, 24)
    outputs = engine.generate(prompts, params, lora=lora)
    assert [output.lora and output.lora.name for output in outputs] == lora
    for name, trainer in trainers.items():
        mine = [output for output in outputs if (output.lora and output.lora.name) == name]
        assert trainer_bits(trainer, mine) == [bits(output.logprobs) for output in mine], name
    # Alone, with nothing in the cache: the same bits, whoever ran beside it.
    engine.reset_cache()
    for index in range(0, 24, 5):
        (alone,) = engine.generate([prompts[index]], params[index], lora=lora[index])
        assert (alone.token_ids, bits(alone.logprobs)) == (
            outputs[index].token_ids,
            bits(outputs[index].logprobs),
        )


def test_several_rounds_to_a_step_and_steps_ahead_keep_their_adapters(trainers, engine):
    several = Engine(base_of(), num_blocks=256, block_size=4, decode_rounds=3)
    several.load_adapter("wide", trainers["wide"])
    prompts, params, _ = asked(7, 12)
    lora = ["wide", None] * 6
    for one, other in zip(
        engine.generate(prompts, params, lora=lora), several.generate(prompts, params, lora=lora), strict=True
    ):
        assert (one.token_ids, bits(one.logprobs)) == (other.token_ids, bits(other.logprobs))


def test_the_merged_model_has_other_bits(trainers, engine):
    """The control: a sum that is rounded once more is seen, and so is the base."""
    prompts, params, _ = asked(9, 12)
    outputs = engine.generate(prompts, params, lora="wide")
    merged = exact.prepare(adapted("wide", base_of()).merge_and_unload())
    for other in (merged, trainers[None], trainers["narrow"]):
        differ = sum(
            a != b
            for a, b in zip(trainer_bits(other, outputs), [bits(o.logprobs) for o in outputs], strict=True)
        )
        assert differ > len(outputs) // 2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_other_families_and_one_adapter_for_all(family):
    trainer = exact.prepare(adapted("wide", base_of(family)))
    engine = Engine(base_of(family), num_blocks=64, block_size=4)
    engine.load_adapter("wide", trainer)
    prompts, params, _ = asked(3, 6)
    outputs = engine.generate(prompts, params, lora="wide")
    assert trainer_bits(trainer, outputs) == [bits(output.logprobs) for output in outputs]


def test_a_prefix_is_found_again_under_its_adapter_alone(engine):
    engine.reset_cache()
    prompt, params = list(range(2, 22)), SamplingParams(max_tokens=2, seed=0)
    cached = {
        name: engine.generate([prompt], params, lora=name)[0].cached_tokens for name in (None, *TARGETS)
    }
    assert set(cached.values()) == {0}
    assert [engine.generate([prompt], params, lora=name)[0].cached_tokens for name in (None, *TARGETS)] == [
        16
    ] * 4


def test_outputs_are_replayed_with_their_adapter(engine):
    prompts, params, lora = asked(5, 6)
    weights = engine.retain_weights()
    for output in engine.generate(prompts, params, lora=lora):
        check_replay(engine, output, lambda _: weights)


def test_siblings_share_a_prefill_under_their_adapter(trainers, engine):
    outputs = engine.generate([[5, 6, 7, 8, 9]], SamplingParams(max_tokens=4, seed=3, n=3), lora="wide")
    assert {output.lora.name for output in outputs} == {"wide"}
    assert trainer_bits(trainers["wide"], outputs) == [bits(output.logprobs) for output in outputs]


def test_gradients_are_those_of_peft(engine):
    """The exact forward has a backward, and it reaches A and B and not the base."""
    (output,) = engine.generate(
        [[5, 6, 7, 8]], SamplingParams(max_tokens=6, seed=1, ignore_eos=True), lora="wide"
    )
    plain = adapted("wide", base_of())
    ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
    logprobs = plain(ids).logits[0, 3:-1].log_softmax(-1)
    logprobs.gather(-1, ids[0, 4:, None]).sum().backward()
    ours = exact.prepare(adapted("wide", base_of()))
    exact.token_logprobs(ours, [output])[0].sum().backward()
    for (name, left), right in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None) == ("lora_" not in name)
        if left.grad is not None:
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-5)

import json

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

import zerodrift as zd
from zerodrift.core.errors import ModelError, ModelNotFound, UnsupportedModel
from zerodrift.models.model_facts import (
    FAMILY_DEFAULTS,
    SAMPLING_KEYS,
    SAVE_TEXT,
    UNLIMITED_CONTEXT,
    facts,
    facts_from,
)

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10,
    "max_position_embeddings": 20,
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
}


def test_facts_of_a_built_in():
    assert facts("testbed:mistral") == zd.models.ModelFacts(
        name="testbed:mistral",
        architecture="MistralForCausalLM",
        vocab_size=512,
        context_length=1024,
        eos_token_ids=(1,),
        bos_token_id=0,
        num_layers=2,
        head_dim=64,
        tied_head=False,
        sliding_window=64,
        generation_defaults={},
    )


def test_a_built_in_and_its_directory_have_the_same_facts(name, written):
    built_in = facts(f"testbed:{name}")
    assert facts(written) == msgspec.structs.replace(built_in, name=name)
    assert built_in.tied_head == (name in ("llama", "gemma3"))


def test_facts_are_those_of_the_model(name, model):
    found, config = facts(f"testbed:{name}"), model.config
    assert found.architecture == type(model).__name__
    assert found.vocab_size == model.get_output_embeddings().weight.shape[0]
    assert found.head_dim == model.model.layers[0].self_attn.head_dim
    assert found.num_layers == len(model.model.layers)
    assert found.tied_head == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    windowed = name in ("mistral", "gemma3")
    assert found.sliding_window == (config.sliding_window if windowed else None)


def test_sampling_defaults_are_read_as_written(llama_directory):
    wanted = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    extra = {"do_sample": True, "min_p": None, "eos_token_id": [3, 1]}
    (llama_directory / "generation_config.json").write_text(json.dumps({**wanted, **extra}))
    found = facts(llama_directory)
    assert found.generation_defaults == wanted
    assert set(wanted) < set(SAMPLING_KEYS)
    assert found.eos_token_ids == (3, 1)
    assert isinstance(found.generation_defaults["top_k"], int)


def test_a_directory_without_generation_config(llama_directory):
    (llama_directory / "generation_config.json").unlink()
    assert facts(llama_directory).eos_token_ids == (1,)


@pytest.mark.parametrize("family", list(FAMILY_DEFAULTS))
def test_family_defaults_are_those_of_transformers(family):
    config = AutoConfig.for_model(family)
    for key, value in FAMILY_DEFAULTS[family].items():
        assert getattr(config, key) == value, key


def test_a_minimal_config():
    found = facts_from("tiny", MINIMAL, {})
    assert (found.head_dim, found.tied_head, found.sliding_window) == (4, False, None)
    assert (found.eos_token_ids, found.bos_token_id) == ((), None)


def test_windows():
    mistral = {**MINIMAL, "model_type": "mistral"}
    assert facts_from("m", mistral, {}).sliding_window == 4096
    assert facts_from("m", {**mistral, "sliding_window": None}, {}).sliding_window is None
    qwen = {**MINIMAL, "model_type": "qwen2", "sliding_window": 32}
    assert facts_from("q", qwen, {}).sliding_window is None
    assert facts_from("q", {**qwen, "use_sliding_window": True}, {}).sliding_window == 32
    full = {**qwen, "use_sliding_window": True, "layer_types": ["full_attention"]}
    assert facts_from("q", full, {}).sliding_window is None


def test_qwen3_has_a_head_size_of_its_own():
    assert facts_from("q", {**MINIMAL, "model_type": "qwen3"}, {}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "error"),
    [
        *(
            ({key: None}, UnsupportedModel)
            for key in ("vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size")
        ),
        # The default of an unknown family is not guessed.
        ({"model_type": "novel"}, UnsupportedModel),
        ({"is_encoder_decoder": True}, UnsupportedModel),
        ({"vocab_size": "10"}, ModelError),
        ({"bos_token_id": 1.5}, ModelError),
        ({"eos_token_id": "end"}, ModelError),
        ({"hidden_size": 9}, ModelError),
        ({"max_position_embeddings": -1}, ModelError),
        ({"num_attention_heads": 0}, ModelError),
        ({"hidden_size": "8"}, ModelError),
    ],
    ids=str,
)
def test_a_config_that_does_not_say_enough(change, error):
    with pytest.raises(error):
        facts_from("tiny", {**MINIMAL, **change}, {})


def test_an_unknown_family_that_says_all_and_no_directory():
    known = {**MINIMAL, "model_type": "novel", "tie_word_embeddings": True}
    assert facts_from("novel", known, {}).tied_head
    with pytest.raises(ModelNotFound):
        facts("nowhere")


def test_all_keys_that_are_missing_are_named_at_once():
    with pytest.raises(UnsupportedModel) as refused:
        facts_from("m", {"architectures": ["NovelForCausalLM"], "model_type": "novel", "vocab_size": 10}, {})
    for key in ("max_position_embeddings", "num_hidden_layers", "hidden_size", "tie_word_embeddings"):
        assert key in str(refused.value)


@pytest.mark.parametrize(
    ("model_type", "architecture", "written", "context"),
    [
        # ALiBi reaches as far as anyone asks; released models say how far they were trained.
        ("bloom", "BloomForCausalLM", {}, UNLIMITED_CONTEXT),
        ("bloom", "BloomForCausalLM", {"seq_length": 2048}, 2048),
        ("mpt", "MptForCausalLM", {"max_seq_len": 4096}, 4096),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM", {}, UNLIMITED_CONTEXT),
        ("xlnet", "XLNetLMHeadModel", {}, UNLIMITED_CONTEXT),
        ("rwkv", "RwkvForCausalLM", {"context_length": 256}, 256),
        ("gpt2", "GPT2LMHeadModel", {"n_positions": 128}, 128),
    ],
)
def test_a_context_is_found_where_the_family_writes_it(model_type, architecture, written, context):
    config = AutoConfig.for_model(model_type, **written).to_dict()
    found = facts_from("saved", {**config, "architectures": [architecture]}, {})
    assert found.context_length == context


def test_the_text_of_a_model_that_also_sees_is_saved_by_what_the_refusal_says(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        **sizes,
        "vocab_size": 64,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    seen = {**sizes, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=seen, mm_tokens_per_image=4)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(UnsupportedModel):
        facts(tmp_path / "whole")
    names = {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "DIR": tmp_path / "whole",
        "NEW": tmp_path / "text",
    }
    exec(SAVE_TEXT, names)
    assert facts(tmp_path / "text").context_length == 64
    ids = torch.arange(5)[None]
    with torch.no_grad():
        alone = zd.models.load(tmp_path / "text")(ids).logits
        assert torch.equal(alone, whole(input_ids=ids).logits)

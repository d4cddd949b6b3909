import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from zerodrift.core.errors import InvalidValue, ModelError, ModelNotFound, UnsafePath, UnsupportedModel
from zerodrift.models.directory import WEIGHTS
from zerodrift.models.loading import load, tokenizer


def rewrite(directory, change):
    """Load the weights, let `change` edit the dict, write them back."""
    tensors = {key: tensor.clone() for key, tensor in load_file(directory / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_directory_gives_the_built_in_bit_for_bit(name, written, words, dtype):
    built_in, loaded = load(f"testbed:{name}", dtype), load(written, dtype)
    state = built_in.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    for key, tensor in loaded.state_dict().items():
        assert tensor.dtype == state[key].dtype
        assert torch.equal(tensor, state[key]), key
    buffers = dict(built_in.named_buffers())
    for key, tensor in loaded.named_buffers():
        assert tensor.dtype == buffers[key].dtype
        assert torch.equal(tensor, buffers[key]), key
    ids = words(2, 90, seed=1)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, built_in(ids).logits)


def test_a_loaded_model_is_ready_for_either_use(llama_directory):
    model = load(str(llama_directory))
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_loaded_model_does_not_follow_its_file(llama_directory):
    """A trainer that saves in place must not change the model that scores."""
    model = load(llama_directory)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    path = llama_directory / WEIGHTS
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x01" * (path.stat().st_size // 2))
        os.fsync(file.fileno())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_loading_leaves_the_global_generator_alone(llama_directory):
    before = torch.random.get_rng_state()
    load(llama_directory)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_loading_prints_nothing(llama_directory, capfd):
    load(llama_directory)
    assert capfd.readouterr() == ("", "")


def holding(name, *values):
    """Weights in which one tensor is another."""
    return lambda d: rewrite(d, lambda tensors: tensors.update({name: torch.tensor(values)}))


def with_norm(value):
    return lambda d: rewrite(d, lambda tensors: tensors["model.norm.weight"].fill_(value))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda d: rewrite(d, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")), "1.mlp.up_proj.weight"),
        (holding("model.surprise", 1.0), "model.surprise"),
        (holding("model.norm.weight", 1.0, 1.0), "model.norm.weight"),
        (with_norm(float("nan")), "model.norm.weight"),
        (with_norm(float("inf")), "model.norm.weight"),
        (lambda d: edit_config(d, num_hidden_layers=4), "10 more"),
        (lambda d: edit_config(d, tie_word_embeddings=False), "lm_head.weight"),
        (lambda d: edit_config(d, num_attention_heads="four"), "num_attention_heads"),
    ],
)
def test_weights_that_are_not_the_models_are_named(llama_directory, spoil, named):
    spoil(llama_directory)
    with pytest.raises(ModelError) as caught:
        load(llama_directory)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["Qwen2ForCausalLM"]},
        {"model_type": "novel", "architectures": ["NovelForCausalLM"]},
        {"model_type": None},
    ],
    ids=str,
)
def test_an_architecture_that_is_not_known(llama_directory, changes):
    edit_config(llama_directory, **changes)
    with pytest.raises(UnsupportedModel):
        load(llama_directory)


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer_config.json", "[]"), ("tokenizer.json", '{"version": "1.0"}')]
)
def test_a_damaged_tokenizer(llama_directory, name, content):
    (llama_directory / name).write_text(content)
    with pytest.raises(ModelError):
        tokenizer(llama_directory)


def test_checks_come_before_the_vendor(llama_directory):
    """The index of a directory is followed by transformers wherever it leads; we do not let it get there."""
    outside = llama_directory.parent / WEIGHTS
    (llama_directory / WEIGHTS).rename(outside)
    names = dict.fromkeys(load_file(outside), f"../{WEIGHTS}")
    (llama_directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UnsafePath):
        load(llama_directory)


@pytest.mark.parametrize("dtype", ["float16", "bf16", ""])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(InvalidValue, match=r"float64.*float32.*bfloat16"):
        load("testbed:llama", dtype)


@pytest.mark.parametrize("function", [load, tokenizer])
def test_no_such_model(function):
    with pytest.raises(ModelNotFound):
        function("testbed:lama")
    with pytest.raises(ModelNotFound):
        function("no/such/directory")


def test_the_tokenizer_of_a_directory(written, name):
    ours, theirs = tokenizer(f"testbed:{name}"), tokenizer(written)
    for text in ("The keeper counted 12+7=19.\n<|im_end|> \u00e9\U0001f600", "don't  \r\n\n e\u0301 1 000"):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text))
    assert theirs.chat_template == ours.chat_template
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos_token_id, ours.bos_token_id)
    assert sorted(theirs.all_special_ids) == sorted(ours.all_special_ids)
    assert len(theirs) == len(ours) == 512
    assert theirs.is_fast

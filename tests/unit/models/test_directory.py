import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from zerodrift.core.errors import ModelError, NoWeights, TruncatedWeights, UnsafePath, UnsupportedModel
from zerodrift.models.directory import (
    INDEX,
    MAX_JSON_BYTES,
    REFUSED_KEYS,
    WEIGHTS,
    check,
    check_tokenizer,
    read_json,
    weight_files,
)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def shard(directory, first="model-1.safetensors", second="model-2.safetensors"):
    """Split the weights in two; the index names them as given."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    half = len(tensors) // 2
    parts = dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])
    for number, part in enumerate(parts, start=1):
        save_file(part, directory / f"model-{number}.safetensors", metadata={"format": "pt"})
    names = {**dict.fromkeys(parts[0], first), **dict.fromkeys(parts[1], second)}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_a_sound_directory_gives_its_config(llama_directory):
    assert check(llama_directory)["architectures"] == ["LlamaForCausalLM"]
    assert weight_files(llama_directory) == (llama_directory / WEIGHTS,)


def test_shards_are_found_through_the_index(llama_directory):
    shard(llama_directory)
    check(llama_directory)
    assert [path.name for path in weight_files(llama_directory)] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]


# Weights


def test_no_weights_at_all(llama_directory):
    (llama_directory / WEIGHTS).unlink()
    with pytest.raises(NoWeights):
        check(llama_directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_by_name(llama_directory, name):
    (llama_directory / WEIGHTS).rename(llama_directory / name)
    with pytest.raises(NoWeights):
        check(llama_directory)


def test_a_distributed_checkpoint_would_be_taken_instead(llama_directory):
    (llama_directory / "shard-00001-model-00001-of-00002.safetensors").touch()
    with pytest.raises(UnsupportedModel):
        check(llama_directory)


@pytest.mark.parametrize("cut", [4, 400_000])
def test_a_truncated_file_is_named_with_its_numbers(llama_directory, cut):
    path = llama_directory / WEIGHTS
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with pytest.raises(TruncatedWeights):
        check(llama_directory)


def test_a_truncated_shard_is_named(llama_directory):
    shard(llama_directory)
    path = llama_directory / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedWeights):
        check(llama_directory)


# Paths


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "sub/../../outside.safetensors", "sub/model.safetensors", "..", "", ".",
     "..\\outside.safetensors"],
)  # fmt: skip
def test_an_index_that_leaves_the_directory(llama_directory, name):
    save_file({"a": torch.ones(1)}, llama_directory.parent / "outside.safetensors")
    shard(llama_directory, second=name)
    with pytest.raises(UnsafePath):
        check(llama_directory)


def test_an_index_with_an_absolute_path(llama_directory):
    outside = llama_directory.parent / "outside.safetensors"
    save_file({"a": torch.ones(1)}, outside)
    shard(llama_directory, second=str(outside))
    with pytest.raises(UnsafePath):
        check(llama_directory)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_link_that_leaves_the_directory(llama_directory, name):
    outside = llama_directory.parent / f"outside-{name}"
    (llama_directory / name).rename(outside)
    (llama_directory / name).symlink_to(outside)
    with pytest.raises(UnsafePath):
        check(llama_directory)


def test_a_shard_that_is_a_link_out(llama_directory):
    shard(llama_directory)
    outside = llama_directory.parent / "outside"
    (llama_directory / "model-2.safetensors").rename(outside)
    (llama_directory / "model-2.safetensors").symlink_to(outside)
    with pytest.raises(UnsafePath):
        weight_files(llama_directory)


def test_a_link_within_the_directory_and_one_that_is_not_read(llama_directory):
    (llama_directory / WEIGHTS).rename(llama_directory / "real.safetensors")
    (llama_directory / WEIGHTS).symlink_to("real.safetensors")
    (llama_directory / "logs").symlink_to(llama_directory.parent)
    check(llama_directory)


def test_templates_in_a_directory_that_is_a_link_or_holds_one(llama_directory, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "evil.jinja").write_text("{{ messages }}")
    templates = llama_directory / "additional_chat_templates"
    templates.symlink_to(outside)
    with pytest.raises(UnsafePath):
        check(llama_directory)
    templates.unlink()
    templates.mkdir()
    (templates / "tool.jinja").write_text("{{ messages }}")
    check(llama_directory)
    (templates / "evil.jinja").symlink_to(outside / "evil.jinja")
    with pytest.raises(UnsafePath):
        check(llama_directory)


def test_the_layout_of_the_hub_cache_is_accepted(llama_directory, tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc123"
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in llama_directory.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    check(snapshot)
    (snapshot / "config.json").unlink()
    (blobs / "config.json").rename(tmp_path / "config.json")
    (snapshot / "config.json").symlink_to("../../../config.json")
    with pytest.raises(UnsafePath):
        check(snapshot)


# The index


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_map(llama_directory, index):
    (llama_directory / WEIGHTS).unlink()
    (llama_directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(NoWeights):
        check(llama_directory)


def test_an_index_of_pickles(llama_directory):
    shard(llama_directory, second="model.bin")
    with pytest.raises(NoWeights):
        check(llama_directory)


def test_an_index_of_a_missing_shard(llama_directory):
    shard(llama_directory, second="model-3.safetensors")
    with pytest.raises(NoWeights):
        check(llama_directory)


# The config


def test_no_config(llama_directory):
    (llama_directory / "config.json").unlink()
    with pytest.raises(UnsupportedModel):
        check(llama_directory)


@pytest.mark.parametrize("key", list(REFUSED_KEYS))
def test_a_config_that_asks_for_more_than_a_model(llama_directory, key):
    edit(llama_directory / "config.json", **{key: {"AutoModelForCausalLM": "modeling.Mine"}})
    with pytest.raises(UnsupportedModel):
        check(llama_directory)


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", ["A", "B"], [3]])
def test_a_config_without_one_architecture(llama_directory, names):
    edit(llama_directory / "config.json", architectures=names)
    with pytest.raises(UnsupportedModel):
        check(llama_directory)


def test_an_adapter_is_not_a_model(llama_directory):
    (llama_directory / "adapter_config.json").write_text('{"base_model_name_or_path": "/etc"}')
    with pytest.raises(UnsupportedModel):
        check(llama_directory)


@pytest.mark.parametrize("content", ["{", "\xff", "[" * 100_000])
def test_json_that_is_none(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_json_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError):
        read_json(tmp_path / "config.json")


def test_json_of_unbounded_size(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelError, match=f"over {MAX_JSON_BYTES} are refused"):
        read_json(tmp_path / "config.json")


# The tokenizer


def test_a_sound_tokenizer(llama_directory):
    check_tokenizer(llama_directory)
    (llama_directory / "tokenizer_config.json").unlink()
    check_tokenizer(llama_directory)


def test_a_tokenizer_with_code(llama_directory):
    edit(llama_directory / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.Mine", None]})
    with pytest.raises(UnsupportedModel):
        check_tokenizer(llama_directory)


def test_no_tokenizer(llama_directory):
    (llama_directory / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel):
        check_tokenizer(llama_directory)

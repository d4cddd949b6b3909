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

OUTSIDE = (
    "absolute",
    "../outside.safetensors",
    "sub/../../outside.safetensors",
    "sub/model.safetensors",
    "..",
    "",
    ".",
    "..\\outside.safetensors",
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


# What is refused


def cut(name, count):
    return lambda d: (d / name).write_bytes((d / name).read_bytes()[:-count])


def renamed(name):
    return lambda d: (d / WEIGHTS).rename(d / name)


def linked_out(name):
    """A file that lies outside, and that a link stands for."""

    def spoil(directory):
        outside = directory.parent / f"outside-{name}"
        (directory / name).rename(outside)
        (directory / name).symlink_to(outside)

    return spoil


def indexed(name):
    """An index whose second shard has this name; a file of that kind lies beside the directory."""

    def spoil(directory):
        outside = directory.parent / "outside.safetensors"
        save_file({"a": torch.ones(1)}, outside)
        shard(directory, second=str(outside) if name == "absolute" else name)

    return spoil


def index_is(content):
    return lambda d: ((d / WEIGHTS).unlink(), (d / INDEX).write_text(json.dumps(content)))


def config_has(**changes):
    return lambda d: edit(d / "config.json", **changes)


CODE = {"AutoModelForCausalLM": "modeling.Mine"}
REFUSED = [
    (NoWeights, lambda d: (d / WEIGHTS).unlink()),
    *((NoWeights, renamed(name)) for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth")),
    *((NoWeights, index_is(index)) for index in ({}, {"weight_map": []}, {"weight_map": {}})),
    *((NoWeights, indexed(name)) for name in ("model.bin", "model-3.safetensors")),
    *((TruncatedWeights, cut(WEIGHTS, count)) for count in (4, 400_000)),
    (TruncatedWeights, lambda d: (shard(d), cut("model-2.safetensors", 1)(d))),
    *((UnsafePath, indexed(name)) for name in OUTSIDE),
    *((UnsafePath, linked_out(name)) for name in (WEIGHTS, "config.json", "tokenizer.json")),
    (UnsafePath, lambda d: (shard(d), linked_out("model-2.safetensors")(d))),
    # A distributed checkpoint: transformers would take it instead.
    (UnsupportedModel, lambda d: (d / "shard-00001-model-00001-of-00002.safetensors").touch()),
    (UnsupportedModel, lambda d: (d / "config.json").unlink()),
    (UnsupportedModel, lambda d: (d / "adapter_config.json").write_text("{}")),
    *((UnsupportedModel, config_has(**{key: CODE})) for key in REFUSED_KEYS),
    *(
        (UnsupportedModel, config_has(architectures=names))
        for names in (None, [], "LlamaForCausalLM", ["A", "B"], [3])
    ),
]


@pytest.mark.parametrize(("error", "spoil"), REFUSED)
def test_a_directory_that_is_refused(llama_directory, error, spoil):
    spoil(llama_directory)
    with pytest.raises(ModelError) as caught:
        check(llama_directory)
    assert type(caught.value) is error


@pytest.mark.parametrize("content", ["{", "\xff", "[" * 100_000, "[1]", " " * (MAX_JSON_BYTES + 1)], ids=len)
def test_json_that_is_none_or_no_object_or_too_large(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError):
        read_json(tmp_path / "config.json")


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


# The tokenizer


def test_a_sound_tokenizer(llama_directory):
    check_tokenizer(llama_directory)
    (llama_directory / "tokenizer_config.json").unlink()
    check_tokenizer(llama_directory)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: edit(d / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.Mine", None]}),
        lambda d: (d / "tokenizer.json").unlink(),
    ],
    ids=["code", "none"],
)
def test_a_tokenizer_that_is_refused(llama_directory, spoil):
    spoil(llama_directory)
    with pytest.raises(UnsupportedModel):
        check_tokenizer(llama_directory)


def test_who_has_no_tokenizer_is_not_told_to_load_it_from_where_it_is_missing(llama_directory):
    (llama_directory / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel) as caught:
        check_tokenizer(llama_directory)
    assert str(caught.value).endswith(
        f"AutoTokenizer.from_pretrained('ORG/NAME').save_pretrained({str(llama_directory)!r})"
    )

import json

import pytest
import torch
from safetensors.torch import load_file

import zerodrift as zd
from zerodrift.core.errors import InvalidValue, ModelNotFound
from zerodrift.models.model_facts import SAMPLING_KEYS
from zerodrift.models.quiet import quiet
from zerodrift.weights.digest import model_digest
from zerodrift.weights.listing import manifest_of


def test_the_files_that_engines_look_for(written):
    assert {path.name for path in written.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


def test_no_sampling_default_is_written(written):
    generation = json.loads((written / "generation_config.json").read_text())
    assert not generation.keys() & set(SAMPLING_KEYS)
    assert generation["eos_token_id"] == 1


def test_the_file_has_the_digest_of_the_model(name, written):
    built_in = model_digest(zd.models.load(f"testbed:{name}"))
    assert model_digest(zd.models.load(written)) == built_in
    # transformers stacks experts that the file holds one by one, as every other reader of such a file expects.
    assert (manifest_of(load_file(written / "model.safetensors")).digest == built_in) == (name != "qwen3-moe")


def test_bfloat16_is_written_as_such(tmp_path):
    directory = zd.models.materialise("testbed:qwen3", tmp_path, dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(directory / "model.safetensors").values()} == {
        torch.bfloat16
    }
    built_in = zd.models.load("testbed:qwen3", "bfloat16")
    assert model_digest(zd.models.load(directory, "bfloat16")) == model_digest(built_in)


def test_writing_again_leaves_an_open_file_alone(tmp_path):
    zd.models.materialise("testbed:llama", tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        before = file.read()
        zd.models.materialise("testbed:qwen2", tmp_path)
        file.seek(0)
        assert file.read() == before
    assert zd.models.facts(tmp_path).architecture == "Qwen2ForCausalLM"


def test_only_built_ins_are_written(tmp_path):
    with pytest.raises(ModelNotFound):
        zd.models.materialise(tmp_path, tmp_path / "copy")


def test_a_bad_dtype_writes_nothing(tmp_path):
    with pytest.raises(InvalidValue):
        zd.models.materialise("testbed:llama", tmp_path / "out", dtype="float8")
    assert not (tmp_path / "out").exists()


def test_nothing_is_printed_and_bars_come_back(tmp_path, capfd):
    from transformers.utils import logging

    zd.models.materialise("testbed:llama", tmp_path)
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with quiet():
        pass
    assert not logging.is_progress_bar_enabled()
    logging.enable_progress_bar()

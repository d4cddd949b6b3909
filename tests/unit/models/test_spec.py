from pathlib import Path

import pytest

from zerodrift.core.errors import InvalidValue, ModelNotFound
from zerodrift.models.spec import builtin_name, directory_of


@pytest.mark.parametrize("spec", ["testbed:qwen3", Path("testbed:qwen3")])
def test_a_built_in_is_named(spec):
    assert builtin_name(spec) == "qwen3"


def test_a_path_is_no_built_in(tmp_path):
    assert builtin_name(tmp_path) is None
    assert directory_of(str(tmp_path)) == tmp_path


def test_a_misspelt_built_in_gets_the_nearest_and_the_list():
    with pytest.raises(ModelNotFound):
        builtin_name("testbed:quen2")


def test_an_unlike_name_gets_the_list_alone():
    with pytest.raises(ModelNotFound):
        builtin_name("testbed:zzzzzzzzzzzzzzzzzz")


@pytest.mark.parametrize("spec", ["llama", "testbad:llama"])
def test_a_forgotten_or_misspelt_prefix_is_suggested(spec):
    with pytest.raises(ModelNotFound):
        directory_of(spec)


def test_nothing_is_downloaded():
    with pytest.raises(ModelNotFound):
        directory_of("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_weight_file_is_not_its_directory(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelNotFound):
        directory_of(file)


@pytest.mark.parametrize("spec", [None, 5, b"testbed:llama", ["testbed:llama"]])
def test_a_model_is_named_by_text_or_a_path(spec):
    with pytest.raises(InvalidValue):
        builtin_name(spec)


def test_capital_letters_are_forgiven_in_the_hint():
    with pytest.raises(ModelNotFound):
        builtin_name("testbed:LLAMA")


def test_a_gguf_file_needs_a_checkpoint_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"--set validation\.reference_model=DIRECTORY"):
        directory_of(tmp_path / "model.gguf")

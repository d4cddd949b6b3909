import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from zerodrift.core.errors import TruncatedWeights
from zerodrift.models.safetensors_header import BITS_PER_ELEMENT, MAX_HEADER_BYTES, check_file


def write(path, header, data=b"", *, length=None):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_a_whole_file_gives_its_entries(path):
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "empty": torch.ones(0, 4)}
    save_file(tensors, path, metadata={"format": "pt"})
    entries = check_file(path)
    assert {name: entry.shape for name, entry in entries.items()} == {"a": (2, 3), "b": (5,), "empty": (0, 4)}
    assert entries["b"].dtype == "BF16"


def test_every_dtype_that_torch_can_save_is_known(path):
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16]
    dtypes += [torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn]
    save_file({str(dtype): torch.zeros(3).to(dtype) for dtype in dtypes}, path)
    assert len(check_file(path)) == len(dtypes)


def entry(dtype="F32", shape=(1,), data_offsets=(0, 4)):
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * (MAX_HEADER_BYTES + 1),
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": entry(shape=[1.5])},
        {"a": entry("F99")},
        {"a": entry(shape=[2])},
        {"a": entry(data_offsets=[0, 8])},
        {"a": entry(shape=[-1, -1])},
        {"a": entry(data_offsets=[-4, 0])},
        {"a": entry(data_offsets=[4, 8])},
        {"a": entry(shape=[10**23])},
        {"a": entry(shape=[2], data_offsets=[0, 8]), "b": entry(shape=[2], data_offsets=[4, 12])},
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_header_that_cannot_be_true(path, header):
    write(path, header, b"\0" * 12)
    with pytest.raises(TruncatedWeights):
        check_file(path)


@pytest.mark.parametrize("length", [None, 1000, MAX_HEADER_BYTES + 1, 2**63])
def test_a_length_longer_than_the_file(path, length):
    if length is None:
        path.write_bytes(b"\x01\x02\x03")
    else:
        write(path, {}, length=length)
    with pytest.raises(TruncatedWeights):
        check_file(path)


@given(cut=st.integers(-40, 40).filter(bool))
def test_any_other_length_is_noticed_with_both_numbers(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    save_file({"a": torch.ones(4, 4), "b": torch.ones(3)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] if cut < 0 else whole + b"\0" * cut)
    with pytest.raises(TruncatedWeights):
        check_file(path)


def test_what_the_check_lets_through_is_what_the_library_reads(path):
    """The reference reader agrees, for a file built by hand from the layout."""
    two = entry(shape=[2], data_offsets=[0, 8])
    write(path, {"__metadata__": {"format": "pt"}, "a": two}, struct.pack("<2f", 1.5, -2.0))
    assert list(check_file(path)) == ["a"]
    assert load_file(path)["a"].tolist() == [1.5, -2.0]
    assert BITS_PER_ELEMENT["F32"] == 32

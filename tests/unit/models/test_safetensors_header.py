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


def test_a_file_too_short_for_its_length(path):
    path.write_bytes(b"\x01\x02\x03")
    with pytest.raises(TruncatedWeights, match=r"model\.safetensors is damaged: it has 3 bytes"):
        check_file(path)


@pytest.mark.parametrize("length", [1000, MAX_HEADER_BYTES + 1, 2**63])
def test_a_header_longer_than_the_file(path, length):
    write(path, {}, length=length)
    with pytest.raises(TruncatedWeights, match=f"claims {length} bytes in a file of 10"):
        check_file(path)


def test_a_header_over_the_limit_is_not_read(path):
    write(path, b" " * (MAX_HEADER_BYTES + 1))
    with pytest.raises(TruncatedWeights, match=f"at most {MAX_HEADER_BYTES}"):
        check_file(path)


@pytest.mark.parametrize(
    "header",
    [b"not json", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [1]}}',
     b'{"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}'],
)  # fmt: skip
def test_a_garbled_header(path, header):
    write(path, header, b"\0" * 4)
    with pytest.raises(TruncatedWeights, match=r"header of \d+ bytes cannot be read"):
        check_file(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}, "dtype 'F99'"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "takes 8 bytes and has 4"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}, "takes 4 bytes and has 8"),
        ({"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}, "neither can be negative"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "neither can be negative"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "starts at byte 4 .* ends at 0"),
        ({"dtype": "F32", "shape": [10**23], "data_offsets": [0, 4]}, "and has 4"),
    ],
)
def test_an_entry_that_cannot_be_true(path, entry, message):
    write(path, {"weight": entry}, b"\0" * 8)
    with pytest.raises(TruncatedWeights, match=f"tensor 'weight'.*{message}"):
        check_file(path)


def test_overlapping_tensors(path):
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write(path, {"a": one, "b": {**one, "data_offsets": [4, 12]}}, b"\0" * 12)
    with pytest.raises(TruncatedWeights, match="'b' starts at byte 4 of the data, the one before ends at 8"):
        check_file(path)


@given(cut=st.integers(-40, 40).filter(bool))
def test_any_other_length_is_noticed_with_both_numbers(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    save_file({"a": torch.ones(4, 4), "b": torch.ones(3)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] if cut < 0 else whole + b"\0" * cut)
    with pytest.raises(
        TruncatedWeights, match=f"describes {len(whole)} bytes and the file has {len(whole) + cut}"
    ):
        check_file(path)


def test_what_the_check_lets_through_is_what_the_library_reads(path):
    """The reference reader agrees, for a file built by hand from the layout."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write(path, {"__metadata__": {"format": "pt"}, "a": entry}, struct.pack("<2f", 1.5, -2.0))
    assert list(check_file(path)) == ["a"]
    assert load_file(path)["a"].tolist() == [1.5, -2.0]
    assert BITS_PER_ELEMENT["F32"] == 32

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from zerodrift.core.errors import TruncatedWeights
from zerodrift.models.directory import shapes_in


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
    assert shapes_in(path) == {"a": (2, 3), "b": (5,), "empty": (0, 4)}


def test_every_dtype_that_torch_can_save_is_known(path):
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16]
    dtypes += [torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn]
    save_file({str(dtype): torch.zeros(3).to(dtype) for dtype in dtypes}, path)
    assert len(shapes_in(path)) == len(dtypes)


FLOAT = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        *(
            b"not json",
            b"[]",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"a": 3}',
            b'{"a": {"dtype": "F32", "shape": [1]}}',
        ),
        *(
            {"a": {**FLOAT, **change}}
            for change in (
                {"shape": [1.5]},
                {"dtype": "F99"},
                {"shape": [2]},
                {"shape": [-1, -1]},
                {"shape": [10**23]},
                {"data_offsets": [0, 8]},
                {"data_offsets": [-4, 0]},
                {"data_offsets": [4, 8]},
            )
        ),
        {"a": {**FLOAT, "shape": [2], "data_offsets": [0, 8]}, "b": {**FLOAT, "data_offsets": [4, 8]}},
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_header_that_cannot_be_true(path, header):
    write(path, header, b"\0" * 8)
    with pytest.raises(TruncatedWeights):
        shapes_in(path)


@pytest.mark.parametrize("length", [1000, 2**24, 2**63])
def test_a_header_longer_than_the_file(path, length):
    for content in (write(path, {}, length=length).read_bytes(), b"\x01\x02\x03"):
        path.write_bytes(content)
        with pytest.raises(TruncatedWeights):
            shapes_in(path)


@given(cut=st.integers(-40, 40).filter(bool))
def test_any_other_length_is_noticed(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    save_file({"a": torch.ones(4, 4), "b": torch.ones(3)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] if cut < 0 else whole + b"\0" * cut)
    with pytest.raises(TruncatedWeights):
        shapes_in(path)

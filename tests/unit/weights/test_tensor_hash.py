import pytest
import torch

from zerodrift.core.errors import InvalidValue
from zerodrift.weights.tensor_hash import tensor_hash


def of(tensor):
    return tensor_hash("weight", tensor)


def test_strides_do_not_count():
    matrix = torch.arange(12.0).reshape(3, 4)
    assert of(matrix.t().contiguous().t()) == of(matrix)
    assert of(torch.arange(24.0).reshape(3, 8)[:, ::2]) == of(torch.arange(0.0, 24, 2).reshape(3, 4))


def test_large_tensors_are_hashed_where_they_are(monkeypatch):
    monkeypatch.setattr("zerodrift.weights.tensor_hash.CHUNK_BYTES", 64)
    matrix = torch.arange(1200.0).reshape(40, 30)
    assert of(matrix.t().contiguous().t()) == of(matrix)
    assert of(torch.stack([matrix, matrix], 1)[:, 0]) == of(matrix)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    assert of(matrix) != of(matrix[3:9]) != of(matrix[0, 0])


def test_bits_count_and_not_values_or_gradients():
    weight = torch.ones(1000)
    changed = weight.clone()
    changed.view(torch.int32)[500] ^= 1
    assert of(torch.nn.Parameter(weight)) == of(weight) != of(changed)
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert of(nan) == of(nan.clone())


def test_the_known_answer():
    """xxh3_128 of the four bytes 00 00 80 3f: other languages must find the same."""
    assert of(torch.ones(1)) == "e6f9acca6893caeb591ef4e963e120d4"


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_every_dtype_and_shape_has_a_hash(dtype, shape):
    assert len(of(torch.zeros(shape).to(dtype))) == 32


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.eye(2).to_sparse()])
def test_what_has_no_plain_content_is_refused(tensor):
    with pytest.raises(InvalidValue, match="'weight'"):
        of(tensor)

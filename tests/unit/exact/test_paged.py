"""Memory of keys and values: zeros that cost nothing until they are written."""

from pathlib import Path

import pytest
import torch

from zerodrift import exact, models
from zerodrift.exact.paged import ALIGNMENT, PagedKV


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def model():
    return exact.prepare(models.load("testbed:llama"))


def test_pages_that_nobody_wrote_take_no_memory(model):
    before = resident()
    kv = PagedKV(model, 2**20 // 16, 16)
    assert kv.nbytes >= 2**28
    assert resident() - before < kv.nbytes // 16


def test_they_are_zeros_where_torch_would_put_them(model):
    for part in (part for layer in PagedKV(model, 3, 5).layers for part in layer):
        assert part.dtype is model.dtype
        assert part.shape[0] == 3
        assert part.is_contiguous()
        assert part.data_ptr() % ALIGNMENT == torch.empty(1000).data_ptr() % ALIGNMENT == 0
        assert not part.any()

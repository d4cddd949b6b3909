"""A model on an accelerator takes and gives what one on the host does. Numbers: tests/gpu/reference_on_cuda.py."""

import copy
from typing import Any

import pytest
import torch

from zerodrift import models
from zerodrift.backends import variants
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.errors import InvalidValue
from zerodrift.models.placing import place

SEQUENCES, STARTS = [[4, 5, 6, 7, 8], [9, 10, 11]], [2, 1]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which tensors crossed, on a machine whose accelerator is its own processor."""
    crossed: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("zerodrift.models.placing._at", lambda value, _device: crossed.append("in") or value)
    back = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: crossed.append("back") or back(tensor))
    return crossed


def placed(monkeypatch: pytest.MonkeyPatch) -> Any:
    model = models.load("testbed:llama")
    monkeypatch.setattr(type(model), "to", lambda self, *_: self)
    return place(model, "cuda")


def test_on_the_host_nothing_is_added() -> None:
    model = models.load("testbed:llama")
    assert place(model, "cpu") is model
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_with_where_to_look() -> None:
    with pytest.raises(InvalidValue):
        ReferenceBackend("testbed:llama", device="cuda")


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("few_at_a_time", [False, True])
def test_whatever_calls_it_inputs_cross_and_logits_come_back(
    layout: Layout, few_at_a_time: bool, moved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = [
        row.tolist()
        for row in Teacher(models.load("testbed:llama"), layout=layout).logprobs(SEQUENCES, STARTS)
    ]
    if few_at_a_time:  # layers and head by themselves
        monkeypatch.setattr("zerodrift.backends.teacher.ROWS_BYTES", 2 * 512 * 4)
    model = placed(monkeypatch)
    there = [row.tolist() for row in Teacher(model, layout=layout).logprobs(SEQUENCES, STARTS)]
    assert there == [pytest.approx(row, abs=1e-5) for row in here]
    assert {"in", "back"} <= set(moved)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda model: variants.with_rope_bases(model, {"": 5000.0})]
)
def test_a_copy_crosses_too(copied: Any, moved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = placed(monkeypatch)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    copied(model)(torch.tensor([[4, 5]]))
    assert moved.count("back") == 1
    assert "in" in moved

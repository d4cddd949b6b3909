"""A copy around the same numbers costs no memory, and what is done to it the original never sees."""

from typing import Any

import pytest
import torch

from zerodrift import models
from zerodrift.backends import variants
from zerodrift.models.copies import sharing


@pytest.fixture
def model() -> Any:
    return models.load("testbed:qwen3", dtype="float32")


def storages(model: Any) -> set[int]:
    return {parameter.data_ptr() for parameter in model.parameters()}


def test_a_copy_has_the_same_numbers_in_the_same_memory(model: Any) -> None:
    assert storages(sharing(model)) == storages(model)


def test_what_was_tied_stays_tied(model: Any) -> None:
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    copied = sharing(model)
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight


def test_buffers_are_its_own(model: Any) -> None:
    before = [buffer.clone() for buffer in model.buffers()]
    for buffer in sharing(model).buffers():
        buffer.zero_()
    assert all(map(torch.equal, before, model.buffers()))
    assert before


@pytest.mark.parametrize(
    "change",
    [variants.with_q4_0_weights, variants.with_fp8_kv, lambda each: variants.in_dtype(each, torch.bfloat16)],
)
def test_no_variant_writes_into_the_numbers_it_shares(model: Any, change: Any) -> None:
    before = {name: each.clone() for name, each in model.state_dict().items()}
    change(model)(input_ids=torch.tensor([[3, 4, 5]]))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert {each.dtype for each in model.parameters()} == {torch.float32}

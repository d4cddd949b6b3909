"""The head of a real model in bf16 and in fp32, behind a body in bf16 both times."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from zerodrift.audit.plan import probe_requests
from zerodrift.audit.probes.head import head_precision
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer
from zerodrift.core.errors import CapabilityMissing
from zerodrift.records.verdict import Outcome


class WideHead(nn.Module):
    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float() @ self.weight.float().T


@pytest.fixture(scope="module")
def requests():
    return probe_requests(512, 512, (0, 1, 2, 3), 0, 6, 60)


@pytest.fixture(scope="module")
def rounded():
    return ReferenceBackend("testbed:llama", dtype="bfloat16")


@pytest.fixture(scope="module")
def wide(rounded):
    engine = ReferenceBackend("testbed:llama", dtype="bfloat16")
    model = copy.deepcopy(rounded.model)
    model.set_output_embeddings(WideHead(model.get_output_embeddings()))
    engine.model = engine.teacher.model = model
    return engine


def test_a_head_in_bf16_is_named_with_its_share(rounded, llama, requests):
    result = head_precision(rounded, llama, requests)
    (cause,) = result.causes
    assert (cause.cause, cause.gating) == ("path/head-precision", False)
    assert result.record.status is Outcome.PASS
    assert result.record.evidence["on_grid"] == 1.0
    low, high = cause.interval
    assert 0.01 < low <= cause.explained <= high < 0.9
    assert "bf16 numbers at" in cause.evidence


def test_a_head_in_fp32_is_not(wide, llama, requests):
    result = head_precision(wide, llama, requests)
    assert result.causes == ()
    assert result.record.status is Outcome.PASS
    assert "the head is not rounded" in result.record.message


def test_without_alternatives_nothing_is_seen(llama, scripted, requests):
    with pytest.raises(CapabilityMissing, match="top-logprobs"):
        head_precision(scripted(lambda request, number: None, capabilities=frozenset()), llama, requests)


def test_alternatives_that_were_promised_and_do_not_come(llama, scripted, completion, requests):
    engine = scripted(lambda request, number: Answer((completion(request.prompt.token_ids),)))
    result = head_precision(engine, llama, requests)
    assert result.record.status is Outcome.INCONCLUSIVE
    assert "0 pairs" in result.record.message

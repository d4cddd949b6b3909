"""Faults that give the evidence of another cause's name: each must go without that name, or have its own.

The causes they look like rest on what the engine does by itself: another model, decoding, one request's output behind
another's prompt. Planted by code of this file, in values that stand nowhere else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request
from zerodrift.faults.damage import Damaged
from zerodrift.faults.rewriting import rewrite
from zerodrift.faults.wrapper import FaultyBackend, clone, the_reference
from zerodrift.records.verdict import Outcome, VerdictRecord

MODEL = "testbed:qwen3"
SMALL = ValidationConfig(num_prompts=16, equivalence_trials=28, max_tokens=12)
CROWD = 11
"""More than the six of the batch probe."""


class InCrowds(FaultyBackend):
    """Reports numbers that are off where enough requests are in flight."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        answers = super().generate(requests)
        if len(requests) < CROWD:
            return answers
        return rewrite(
            requests,
            answers,
            lambda _, each: msgspec.structs.replace(
                each, logprobs=tuple(value + 0.03 * float(np.sin(61 * value)) for value in each.logprobs)
            ),
        )


class _Warming:
    """A model whose logits grow from the fifth token of an output on."""

    def __init__(self, model: Any) -> None:
        self.dtype, self.device, self.config = model.dtype, model.device, model.config
        self._model, self._step = model, 0

    def __call__(self, ids_BL: torch.Tensor, **options: Any) -> Any:
        self._step = 0 if options.get("past_key_values") is None else self._step + 1
        output = self._model(ids_BL, **options)
        if self._step >= 4:
            output.logits = output.logits * 1.13
        return output


class WarmsUp(FaultyBackend):
    """Samples and reports with logits that depend on how many tokens came before; scores are right."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        engine = the_reference(clone(self.inner))
        engine.model = _Warming(engine.model)
        return engine.generate(requests)


def rolled(engine: Backend) -> Backend:
    """Every id comes out one too high: nothing is left of what a token says about its context."""

    def damage(model: Any) -> None:
        head = model.get_output_embeddings()
        head.register_forward_hook(lambda _, __, logits: torch.roll(logits, 1, -1))

    return Damaged(engine, damage)


@pytest.fixture
def judge(matrix, reference, tmp_path):
    def run(plant: Callable[[Backend], Backend]) -> VerdictRecord:
        engine = plant(ReferenceBackend(MODEL, dtype="float32"))
        record: VerdictRecord = matrix.judge(engine, reference(MODEL), tmp_path, SMALL)
        return record

    return run


def named(record: VerdictRecord) -> list[str]:
    assert record.verdict is Outcome.FAIL
    return [cause.cause for cause in record.causes if cause.gating]


def test_more_company_than_a_probe_has_is_asked_for(judge):
    record = judge(InCrowds)
    assert named(record) == ["path/batch-variance"]
    assert "right when they are asked alone" in record.causes[0].evidence


@pytest.mark.long
def test_logits_by_output_index_are_not_called_decoding(judge):
    assert named(judge(WarmsUp))[0] == "unexplained"


@pytest.mark.long
def test_ids_that_are_off_by_one_are_no_other_model(judge):
    assert named(judge(rolled))[0] == "unexplained"


@pytest.mark.long
def test_the_same_engine_without_them_passes(judge):
    assert judge(FaultyBackend).verdict is Outcome.PASS

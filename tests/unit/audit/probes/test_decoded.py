"""Decoding told from what is done to its numbers, on a model whose decoding is changed by hooks of this file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.decode_damage import narrow_kv, positions_ahead, quieter_steps

from zerodrift.audit.plan import probe_requests
from zerodrift.audit.probes.consistency import SelfConsistency
from zerodrift.audit.probes.decoded import bent_alike, decoded_only
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request
from zerodrift.faults.damage import Damaged
from zerodrift.faults.wrapper import FaultyBackend, clone, the_reference
from zerodrift.records.evidence import AgreementEvidence


def pairs(off: Sequence[Sequence[float]]) -> list[tuple[Any, Any]]:
    return [(np.array(row) - 1.0, np.full(len(row), -1.0)) for row in off]


@pytest.mark.parametrize(
    ("off", "only"),
    [
        ([[0.0] + [0.1] * 7] * 6, True),
        ([[1e-6] + [0.1] * 7] * 6, True),
        # One first token that is off, or few tokens that are: a report may do that.
        ([[0.0] + [0.1] * 7] * 5 + [[0.1] * 8], False),
        ([[0.0] + [0.1] * 3 + [0.0] * 4] * 6, False),
        ([[0.0] * 8] * 6, False),
        ([[0.0, 0.1]] * 2, False),
        ([[]] * 6, False),
    ],
)
def test_first_tokens_are_spared_and_nearly_all_others_are_not(off, only, gates):
    assert decoded_only(pairs(off), gates) is only


RIGHT = -np.sort(np.random.default_rng(2).exponential(2.0, 20))


@pytest.mark.parametrize(
    ("moved", "alike"),
    [
        (np.full(20, 0.3), True),
        (np.where(np.arange(20) < 5, -1.0, 0.2), True),
        (0.08 * RIGHT + 0.1, True),
        (30 * np.tanh(RIGHT / 30) - RIGHT, True),
        (np.random.default_rng(3).normal(0, 0.1, 20), False),
        (0.08 * RIGHT + np.random.default_rng(4).normal(0, 0.1, 20), False),
    ],
    ids=[
        "one number",
        "but a few",
        "a temperature",
        "a cap",
        "another forward",
        "a temperature and another forward",
    ],
)
def test_what_bends_all_alternatives_by_one_curve_is_no_forward(moved, alike):
    assert bent_alike(RIGHT, moved, 1e-4) is alike


def test_few_alternatives_are_no_curve():
    assert not bent_alike(RIGHT[:4], np.array([0.3, -0.1, 0.2, 0.7]), 1e-4)


class Stubborn(FaultyBackend):
    """Likes best what it has said already: no penalty that anybody offers, and not decoding."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        twin = the_reference(clone(self.inner))
        twin.model = _Repeating(twin.model)
        return [twin.generate([request])[0] for request in requests]


class _Repeating:
    """Stands in for a model, and is called as `sample` calls one."""

    def __init__(self, model: Any) -> None:
        self.dtype, self.device, self.config, self._model = model.dtype, model.device, model.config, model
        self._said: list[int] = []

    def __call__(self, ids_BL: torch.Tensor, **options: Any) -> Any:
        self._said = [*self._said, int(ids_BL[0, -1])] if options["past_key_values"] is not None else []
        output = self._model(ids_BL, **options)
        output.logits[:, -1, self._said] = output.logits[:, -1].amax() + 2.0
        return output


@pytest.fixture(scope="module")
def engine():
    return ReferenceBackend("testbed:llama", dtype="float32")


@pytest.mark.parametrize(
    ("plant", "name", "only"),
    [
        (lambda engine: Damaged(engine, positions_ahead(1)), "path/rope", True),
        (lambda engine: Damaged(engine, positions_ahead(-2)), "path/rope", True),
        (lambda engine: Damaged(engine, narrow_kv(torch.float8_e4m3fn)), "path/kv-precision", True),
        (lambda engine: Damaged(engine, narrow_kv(torch.float8_e5m2)), "path/kv-precision", True),
        (lambda engine: Damaged(engine, quieter_steps(0.9)), "path/prefill-decode", True),
        # Listed, because no two ways round alike.
        (lambda engine: engine, "path/prefill-decode", False),
        (Stubborn, "path/prefill-decode", False),
    ],
    ids=["ahead", "behind", "e4m3", "e5m2", "unknown", "sound", "processed"],
)
def test_what_decoding_does_is_named_by_what_predicts_it(engine, llama, gates, plant, name, only):
    requests = probe_requests(llama.facts.vocab_size, 512, (), 3, 6, 48)
    result = SelfConsistency(plant(engine), llama, requests, gates, "salt").prefill_decode()
    assert [cause.cause for cause in result.causes] == [name]
    assert isinstance(result.evidence, AgreementEvidence)
    assert result.evidence.prefill_is_right
    assert result.evidence.decoded_only is only
    assert bool(result.evidence.predicted) is (name != "path/prefill-decode")

"""Faults of one of an engine's two ways to a number: decoding, or scores of given tokens; and of reports of one of them.

Each is planted by code of this file, in values that stand nowhere else, beside the same engine without it. The engine
shows the fault in no setting: what names it is which of its numbers are wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.decode_damage import narrow_kv, positions_ahead, quieter_steps

from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Request
from zerodrift.faults.damage import Damage, Damaged
from zerodrift.faults.reporting import Misreported
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.verdict import CauseFound, Outcome, VerdictRecord

pytestmark = pytest.mark.long
SMALL = ValidationConfig(num_prompts=16, equivalence_trials=40, max_tokens=16)
Rows = list[list[float]]


@pytest.fixture
def judge(matrix, reference, tmp_path):
    def run(plant, spec="testbed:qwen3"):
        engine = plant(ReferenceBackend(spec, dtype="float32"))
        record: VerdictRecord = matrix.judge(engine, reference(spec), tmp_path, SMALL)
        return record

    return run


def gating(record: VerdictRecord) -> list[CauseFound]:
    return [cause for cause in record.causes if cause.gating]


def named(record: VerdictRecord) -> list[str]:
    assert record.verdict is Outcome.FAIL
    return [cause.cause for cause in gating(record)]


# --- scores of given tokens ---------------------------------------------------------------------------------------


class Rescored(FaultyBackend):
    """Decodes as the engine beneath, and scores otherwise."""

    def __init__(self, inner: Backend, change: Callable[[list[float]], list[float]]) -> None:
        super().__init__(inner)
        self._change = change

    def score(self, sequences: Sequence[Sequence[int]]) -> Rows:
        return [self._change(row) for row in super().score(sequences)]


class OtherModelScores(FaultyBackend):
    """Scores with a model of its own."""

    def __init__(self, inner: Backend, damage: Damage) -> None:
        super().__init__(inner)
        self._other = Damaged(inner, damage)

    def score(self, sequences: Sequence[Sequence[int]]) -> Rows:
        return self._other.score(sequences)


def late(row: list[float]) -> list[float]:
    return [row[0], *row[:-1]]


def hotter(factor: float) -> Damage:
    def damage(model: Any) -> None:
        model.lm_head.register_forward_hook(lambda _, __, logits_BLV: logits_BLV / factor)

    return damage


def another_gain(model: Any) -> None:
    model.base_model.layers[1].post_attention_layernorm.weight.data *= 1.3


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (lambda engine: Rescored(engine, late), "semantic/off-by-one"),
        (lambda engine: OtherModelScores(engine, hotter(1.7)), "semantic/temperature"),
        # Another model scores: no report explains that, and the two ways do differ.
        (lambda engine: OtherModelScores(engine, another_gain), "path/prefill-decode"),
    ],
    ids=["late", "temperature", "another model"],
)
def test_scores_that_are_wrong_where_decoding_is_right(judge, plant, name):
    record = judge(plant)
    assert named(record) == [name]
    if name != "path/prefill-decode":
        assert gating(record)[0].found_by == "given-tokens"


# --- in company ---------------------------------------------------------------------------------------------------


class RoundedInCompany(FaultyBackend):
    """Rounds the logits of requests that are answered with so many others; who arrives too late is answered after them."""

    def __init__(self, inner: Backend, company: int, dtype: torch.dtype, most_late: int = 0) -> None:
        super().__init__(inner)

        def rounded(model: Any) -> None:
            model.lm_head.register_forward_hook(lambda _, __, logits: logits.to(dtype).to(logits.dtype))

        self._rounded, self._company, self._late = Damaged(inner, rounded), company, most_late
        self._dice = np.random.default_rng(3)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        late = int(self._dice.integers(0, self._late + 1)) if len(requests) > self._late else 0
        first, last = requests[: len(requests) - late], requests[len(requests) - late :]
        return [*self._served(first), *(answer for one in last for answer in self._served([one]))]

    def _served(self, requests: Sequence[Request]) -> list[Answer]:
        if len(requests) < self._company:
            return super().generate(requests)
        return self._rounded.generate(requests)


@pytest.mark.parametrize("late", [0, 2])
def test_what_is_rounded_in_company_is_blamed_on_company(judge, late):
    record = judge(lambda engine: RoundedInCompany(engine, 4, torch.bfloat16, late))
    assert named(record) in (["path/batch-variance"], ["path/head-precision"])


# --- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (positions_ahead(1), {"path/rope"}),
        (narrow_kv(torch.bfloat16), {"path/kv-precision"}),
        (quieter_steps(0.9), {"path/prefill-decode"}),
    ],
    ids=["positions", "bf16", "quieter"],
)
def test_what_only_decoding_does_is_blamed_on_it(judge, damage, names):
    record = judge(lambda engine: Damaged(engine, damage))
    assert set(named(record)) == names


# --- reports of decoded tokens ------------------------------------------------------------------------------------


class RenormalisedOver(FaultyBackend):
    """Reports logprobs of the likeliest `count` tokens, as if there were no others."""

    def __init__(self, inner: Backend, count: int) -> None:
        super().__init__(inner)
        self._count, self._model = count, inner.model

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return [
            msgspec.structs.replace(
                answer, completions=tuple(self._restated(each) for each in answer.completions)
            )
            for answer in super().generate(requests)
        ]

    @torch.no_grad()
    def _restated(self, completion: Completion) -> Completion:
        logits_LV = self._model(torch.tensor([completion.sequence])).logits[0].double()
        rows_TV = logits_LV[len(completion.prompt_token_ids) - 1 : -1] / completion.sampling.temperature
        mass_T = torch.log_softmax(rows_TV, -1).topk(self._count, -1).values.logsumexp(-1)
        told = np.array(completion.logprobs) - mass_T.numpy()
        return msgspec.structs.replace(completion, logprobs=tuple(np.minimum(told, 0.0).tolist()))


def first_is(value: float) -> Callable[[Request, Completion], Completion]:
    def change(_: Request, completion: Completion) -> Completion:
        return msgspec.structs.replace(completion, logprobs=(value, *completion.logprobs[1:]))

    return change


@pytest.mark.parametrize("count", [3, 17])
def test_the_number_of_tokens_that_a_report_is_renormalised_over_is_fitted(judge, count):
    record = judge(lambda engine: RenormalisedOver(engine, count))
    assert named(record) == ["semantic/truncation-mass"]
    assert f" {count} " in gating(record)[0].evidence


def test_a_placeholder_for_the_first_logprob_is_one(judge):
    record = judge(lambda engine: Misreported(engine, first_is(0.0)))
    assert named(record) == ["semantic/nonfinite"]


def test_an_unknown_report_is_not_blamed_on_decoding(judge):
    """Numbers of no distribution, the first of an output among them: decoding is right, and has no name for it."""

    def bent(_, completion):
        told = tuple(-(abs(value) ** 1.2) - 0.3 * value * value for value in completion.logprobs)
        return msgspec.structs.replace(completion, logprobs=told)

    assert named(judge(lambda engine: Misreported(engine, bent))) == ["unexplained"]

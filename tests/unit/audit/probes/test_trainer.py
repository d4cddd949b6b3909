"""Trainers whose forward is wrong in one way each, over the llama testbed in fp64."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from zerodrift import models
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.audit.probes.trainer import trainer
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.faults.registry import resolve
from zerodrift.records.verdict import Outcome

Scores = Callable[[Sequence[Sequence[int]]], list[list[float]]]


class Trainer:
    """A scorer made of a function."""

    def __init__(self, score: Scores) -> None:
        self.score = score


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(4, 500, 30 + row).tolist()) for row in range(10)]


@pytest.fixture
def judge(llama, gates, sequences):
    return lambda score: trainer(Trainer(score), llama, sequences, gates)


def cause(result: ProbeResult) -> str:
    assert result.record.status is Outcome.FAIL
    (only,) = result.causes
    assert only.evidence == result.record.message
    return only.cause


def changed(llama: ReferenceBackend, change: Callable[[int, np.ndarray], np.ndarray]) -> Scores:
    """The reference's scores with something done to each row, given its place in the batch."""
    return lambda batch: [
        change(place, np.array(row)).tolist() for place, row in enumerate(llama.score(batch))
    ]


def test_the_references_own_scores_pass(llama, judge):
    result = judge(llama.score)
    assert result.record.status is Outcome.PASS
    assert result.record.evidence["mean"] == 0.0
    assert result.record.evidence["tokens"] == sum(29 + row for row in range(10))


def test_a_few_tokens_decide_nothing(llama, gates, sequences):
    result = trainer(llama, llama, sequences[:2], gates)
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)


def test_packed_sequences_that_see_each_other(llama, judge):
    @torch.no_grad()
    def packed(batch):
        ids = torch.tensor([[token for sequence in batch for token in sequence]])
        positions = torch.cat([torch.arange(len(sequence)) for sequence in batch])[None]
        mask = torch.ones_like(ids)
        rows = torch.log_softmax(
            llama.model(ids, position_ids=positions, attention_mask=mask).logits[0].double(), -1
        )
        scores, begin = [], 0
        for sequence in batch:
            own = rows[begin : begin + len(sequence) - 1]
            scores.append(own[torch.arange(len(own)), torch.tensor(list(sequence[1:]))].tolist())
            begin += len(sequence)
        return scores

    result = judge(packed)
    assert cause(result) == "trainer/packing"
    assert result.causes[0].explained > 0.99


def test_weights_in_bf16_are_not_called_autocast(judge):
    narrow = ReferenceBackend("testbed:llama", dtype="bfloat16")
    assert cause(judge(narrow.score)) == "trainer/precision"


def test_autocast_is_named_where_it_is(judge):
    cast = resolve("trainer/autocast").scorer(models.load("testbed:llama"))
    assert cause(judge(cast.score)) == "trainer/autocast"


@pytest.mark.parametrize("temperature", [0.7, 0.95, 1.3])
def test_a_scorer_at_a_temperature(llama, judge, temperature):
    def tempered(batch):
        rows = llama.teacher.logits(batch, [1] * len(batch))
        return [
            torch.log_softmax(row / temperature, dim=-1)[range(len(ids) - 1), list(ids[1:])].tolist()
            for row, ids in zip(rows, batch, strict=True)
        ]

    result = judge(tempered)
    assert cause(result) == "semantic/temperature"
    assert result.causes[0].explained > 0.99
    fix = result.causes[0].fix
    assert fix.startswith("have the scorer return logprobs at temperature 1"), (
        "it divides as a step rightly does"
    )


def test_one_sequence_that_comes_out_differently_each_time(llama, gates):
    """Right alone and wrong together, with nothing to be together with."""
    calls = []

    def moody(batch):
        calls.append(batch)
        return [[value - 0.5 * (len(calls) == 1) for value in row] for row in llama.score(batch)]

    ids = tuple(np.random.default_rng(1).integers(4, 500, 250).tolist())
    assert cause(trainer(Trainer(moody), llama, [ids], gates)) == "trainer/micro-batch"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda place, row: row - 0.1 * (place % 2), "trainer/micro-batch"),
        (lambda place, row: row - 0.3 * (np.arange(len(row)) >= 8), "trainer/positions"),
        # Where only long sequences reach: those that are scored alone must be the wrong ones, not the first.
        (lambda place, row: row - 0.3 * (np.arange(len(row)) >= 30), "trainer/positions"),
        (lambda place, row: row - 1.0, "unexplained"),
        (lambda place, row: np.roll(row, 1), "semantic/off-by-one"),
        (lambda place, row: np.roll(row, -1), "semantic/off-by-one"),
        # The neighbour after next is nobody's off-by-one.
        (lambda place, row: np.roll(row, 2), "unexplained"),
        # One wrong number is no shifted position.
        (lambda place, row: row - 3.0 * (np.arange(len(row)) == len(row) - 1) * (place == 0), "unexplained"),
    ],
)
def test_what_is_done_to_each_row_is_named(llama, judge, change, named):
    assert cause(judge(changed(llama, change))) == named

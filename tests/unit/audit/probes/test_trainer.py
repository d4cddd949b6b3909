"""Trainers whose forward is wrong in one way each, over the llama testbed in fp64."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from zerodrift.audit.probes.result import ProbeResult
from zerodrift.audit.probes.trainer import trainer
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import InvalidValue
from zerodrift.drift.gates import Gates
from zerodrift.records.verdict import Outcome

Scores = Callable[[Sequence[Sequence[int]]], list[list[float]]]


class Trainer:
    """A scorer made of a function."""

    def __init__(self, score: Scores) -> None:
        self.score = score


@pytest.fixture(scope="module")
def sequences() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(4, 500, 30 + row).tolist()) for row in range(10)]


@pytest.fixture
def judge(
    llama: ReferenceBackend, gates: Gates, sequences: list[tuple[int, ...]]
) -> Callable[[Scores], ProbeResult]:
    return lambda score: trainer(Trainer(score), llama, sequences, gates)


Judge = Callable[[Scores], ProbeResult]


def cause(result: ProbeResult) -> str:
    assert result.record.status is Outcome.FAIL
    (only,) = result.causes
    assert only.evidence == result.record.says
    return only.cause


def changed(llama: ReferenceBackend, change: Callable[[int, np.ndarray], np.ndarray]) -> Scores:
    """The reference's scores with something done to each row, given its place in the batch."""
    return lambda batch: [
        change(place, np.array(row)).tolist() for place, row in enumerate(llama.score(batch))
    ]


def test_the_references_own_scores_pass(llama: ReferenceBackend, judge: Judge) -> None:
    result = judge(llama.score)
    assert result.record.status is Outcome.PASS
    assert result.record.evidence["mean"] == 0.0
    assert result.record.evidence["tokens"] == sum(29 + row for row in range(10))


def test_a_few_tokens_decide_nothing(
    llama: ReferenceBackend, gates: Gates, sequences: list[tuple[int, ...]]
) -> None:
    result = trainer(llama, llama, sequences[:2], gates)
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)


def test_packed_sequences_that_see_each_other(llama: ReferenceBackend, judge: Judge) -> None:
    @torch.no_grad()
    def packed(batch: Sequence[Sequence[int]]) -> list[list[float]]:
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


def test_rows_that_depend_on_their_neighbours(llama: ReferenceBackend, judge: Judge) -> None:
    spoiled = changed(llama, lambda place, row: row - 0.1 * (place % 2))
    assert cause(judge(spoiled)) == "trainer/micro-batch"


def test_wrong_from_a_position_on(llama: ReferenceBackend, judge: Judge) -> None:
    shifted = changed(llama, lambda place, row: row - 0.3 * (np.arange(len(row)) >= 8))
    result = judge(shifted)
    assert cause(result) == "trainer/positions"
    assert "up to position 8" in result.record.says


def test_wrong_where_only_long_sequences_reach(
    llama: ReferenceBackend, gates: Gates, sequences: list[tuple[int, ...]]
) -> None:
    """The sequences that are scored alone must be those that are wrong, not those that come first."""
    shifted = changed(llama, lambda place, row: row - 0.3 * (np.arange(len(row)) >= 30))
    result = trainer(Trainer(shifted), llama, sequences, gates)
    assert cause(result) == "trainer/positions"


def test_noise_of_the_size_of_bf16(llama: ReferenceBackend, judge: Judge) -> None:
    narrow = ReferenceBackend("testbed:llama", dtype="bfloat16")
    assert cause(judge(narrow.score)) == "trainer/autocast"


def test_another_model_is_unexplained(llama: ReferenceBackend, judge: Judge) -> None:
    result = judge(changed(llama, lambda place, row: row - 1.0))
    assert cause(result) == "unexplained"
    assert result.causes[0].explained == 0.0


def test_one_sequence_that_comes_out_differently_each_time(llama: ReferenceBackend, gates: Gates) -> None:
    """Right alone and wrong together, with nothing to be together with."""
    calls = []

    def moody(batch: Sequence[Sequence[int]]) -> list[list[float]]:
        calls.append(batch)
        return [[value - 0.5 * (len(calls) == 1) for value in row] for row in llama.score(batch)]

    ids = tuple(np.random.default_rng(1).integers(4, 500, 250).tolist())
    assert cause(trainer(Trainer(moody), llama, [ids], gates)) == "trainer/micro-batch"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows[:-1],
        lambda rows: [row[:-1] for row in rows],
        lambda rows: [[float("nan"), *row[1:]] for row in rows],
        lambda rows: [[None, *row[1:]] for row in rows],
        lambda rows: [[float("-inf"), *row[1:]] for row in rows],
    ],
    ids=["a row fewer", "a number fewer", "nan", "null", "infinite"],
)
def test_a_scorer_that_breaks_its_promise(
    llama: ReferenceBackend, judge: Judge, spoil: Callable[[list[list[float]]], list[list[float]]]
) -> None:
    with pytest.raises(InvalidValue, match="the trainer's scorer gave"):
        judge(lambda batch: spoil(llama.score(batch)))


def out_of_memory(batch: Sequence[Sequence[int]]) -> list[list[float]]:
    raise RuntimeError("CUDA out of memory\nand a page more")


def leaving(batch: Sequence[Sequence[int]]) -> list[list[float]]:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (out_of_memory, "failed: RuntimeError: CUDA out of memory$"),
        (leaving, "failed: SystemExit: 0"),
        (lambda batch: None, "failed: TypeError"),
        (lambda batch: [None] * len(batch), "gave scores of shape"),
        (lambda batch: ["x"] * len(batch), "failed: ValueError"),
        (lambda batch: [[[-1.0]] * (len(ids) - 1) for ids in batch], "gave scores of shape"),
    ],
)
def test_a_scorer_that_fails_is_not_taken_for_the_engine(judge: Judge, score: Scores, says: str) -> None:
    with pytest.raises(InvalidValue, match=f"the trainer's scorer {says}"):
        judge(score)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_any_kind_are_scores(llama: ReferenceBackend, judge: Judge, dtype: torch.dtype) -> None:
    def score(batch: Sequence[Sequence[int]]) -> Any:
        return (torch.tensor(row, dtype=dtype, requires_grad=True) for row in llama.score(batch))

    assert judge(score).record.evidence["mean"] < 0.1


def test_one_wrong_number_is_no_shifted_position(llama: ReferenceBackend, judge: Judge) -> None:
    wrong = changed(
        llama, lambda place, row: row - 3.0 * (np.arange(len(row)) == len(row) - 1) * (place == 0)
    )
    assert cause(judge(wrong)) == "unexplained"

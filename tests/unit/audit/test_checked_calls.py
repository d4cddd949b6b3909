from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zerodrift.audit.checked_calls import generated, score_user_forward, scored
from zerodrift.core.completion import Answer
from zerodrift.core.errors import BadAnswer, InvalidValue
from zerodrift.core.request import Prompt, Request

REQUESTS = [Request(Prompt((1, 2))), Request(Prompt((3,)))]


def test_as_many_answers_as_requests(scripted):
    assert generated(scripted(lambda request, number: Answer(())), REQUESTS) == [Answer(()), Answer(())]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_is_no_answer(scripted, count):
    engine = scripted(None)
    engine.generate = lambda requests: [Answer(())] * count
    with pytest.raises(BadAnswer, match=f"scripted gave {count} answers to 2 requests"):
        generated(engine, REQUESTS)


def test_scores_are_one_number_for_every_token_but_the_first(scripted):
    rows = scored(
        scripted(None, lambda ids: [-0.5 * place for place in range(1, len(ids))]), [(1, 2, 3), (4,)], "x"
    )
    assert [row.tolist() for row in rows] == [[-0.5, -1.0], []]
    assert rows[0].dtype == np.float64


@pytest.mark.parametrize(
    "scores", [[-1.0], [-1.0] * 3, [-1.0, float("nan")], [None, -1.0], [float("-inf"), -1]]
)
def test_anything_else_is_no_score(scripted, scores):
    with pytest.raises(BadAnswer, match=r"the engine gave \d numbers for 3 tokens"):
        scored(scripted(None, lambda ids: scores), [(1, 2, 3)], "the engine")


def test_scores_for_other_sequences_are_none(scripted):
    engine = scripted(None)
    engine.score = lambda sequences: [[-1.0] * 2]
    with pytest.raises(BadAnswer):
        scored(engine, [(1, 2, 3), (4, 5, 6)], "the engine")


def failing(error: BaseException) -> Callable[[Any], Any]:
    def score(batch: Any) -> Any:
        raise error

    return score


@pytest.mark.parametrize(
    "score",
    [
        failing(RuntimeError("CUDA out of memory\nand a page more")),
        failing(SystemExit(0)),
        lambda batch: None,
        lambda batch: [],
        lambda batch: [None] * len(batch),
        lambda batch: ["x"] * len(batch),
        lambda batch: [[[-1.0]] * 2] * len(batch),
        lambda batch: [[-1.0]] * len(batch),
        lambda batch: [[float("nan"), -1.0]] * len(batch),
        lambda batch: [[float("-inf"), -1.0]] * len(batch),
        lambda batch: [[None, -1.0]] * len(batch),
    ],
)
def test_a_users_forward_that_fails_is_never_taken_for_the_engine(score):
    with pytest.raises(InvalidValue, match=r"^theirs ") as caught:
        score_user_forward(SimpleNamespace(score=score), [(1, 2, 3)], "theirs")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_any_kind_are_scores(dtype):
    rows = (torch.tensor([-1.0, -2.0], dtype=dtype, requires_grad=True) for _ in range(2))
    found = score_user_forward(SimpleNamespace(score=lambda batch: rows), [(1, 2, 3)] * 2, "theirs")
    assert [row.tolist() for row in found] == [[-1.0, -2.0]] * 2

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zerodrift.audit.checked_calls import generated, scored
from zerodrift.core.completion import Answer
from zerodrift.core.errors import BadAnswer
from zerodrift.core.request import Prompt, Request

REQUESTS = [Request(Prompt((1, 2))), Request(Prompt((3,)))]
Engine = Callable[..., Any]


def test_as_many_answers_as_requests(scripted: Engine) -> None:
    assert generated(scripted(lambda request, number: Answer(())), REQUESTS) == [Answer(()), Answer(())]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_is_no_answer(scripted: Engine, count: int) -> None:
    engine = scripted(None)
    engine.generate = lambda requests: [Answer(())] * count
    with pytest.raises(BadAnswer, match=f"scripted gave {count} answers to 2 requests"):
        generated(engine, REQUESTS)


def test_scores_are_one_number_for_every_token_but_the_first(scripted: Engine) -> None:
    rows = scored(
        scripted(None, lambda ids: [-0.5 * place for place in range(1, len(ids))]), [(1, 2, 3), (4,)], "x"
    )
    assert [row.tolist() for row in rows] == [[-0.5, -1.0], []]
    assert rows[0].dtype == np.float64


@pytest.mark.parametrize(
    "scores", [[-1.0], [-1.0] * 3, [-1.0, float("nan")], [None, -1.0], [float("-inf"), -1]]
)
def test_anything_else_is_no_score(scripted: Engine, scores: list[Any]) -> None:
    with pytest.raises(BadAnswer, match=r"the engine gave \d numbers for 3 tokens"):
        scored(scripted(None, lambda ids: scores), [(1, 2, 3)], "the engine")

"""Failing requests become small, right ones are left alone, and the engine is not asked for ever."""

from collections.abc import Callable

import pytest

from zerodrift.audit.reduce import MOST_QUESTIONS, Requests, reduce
from zerodrift.core.request import Prompt, Request, SamplingParams

ASKED = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=24, seed=3)


def request(*token_ids: int, sampling: SamplingParams = ASKED) -> Request:
    return Request(Prompt(token_ids), sampling)


def crowd(prompt: tuple[int, ...], company: int = 7) -> Requests:
    return (request(*prompt), *(request(100 + number) for number in range(company)))


class Engine:
    """Wrong at token `at` where `wrong` says so."""

    def __init__(self, wrong: Callable[[Requests], bool], at: int = 0) -> None:
        self.wrong, self.at, self.asked = wrong, at, 0

    def __call__(self, requests: Requests) -> int | None:
        self.asked += 1
        return self.at if self.wrong(requests) else None


def smallest(engine: Engine, requests: Requests) -> Requests:
    found = reduce(requests, engine)
    assert found is not None
    assert engine.asked <= MOST_QUESTIONS
    assert engine.wrong(found), "what is given back was seen to fail"
    return found


def test_an_answer_that_is_right_when_asked_again_gives_no_case():
    assert reduce(crowd((1, 2, 3)), Engine(lambda requests: False)) is None


def test_where_everything_fails_one_token_is_left():
    (only,) = smallest(Engine(lambda requests: True), crowd(tuple(range(200))))
    assert len(only.prompt.token_ids) == 1
    assert only.sampling == SamplingParams(max_tokens=1, seed=3)


def test_what_the_fault_needs_stays():
    """A pair of tokens far apart, a temperature, and four tokens of output."""

    def wrong(requests):
        ids, sampling = requests[0].prompt.token_ids, requests[0].sampling
        return {17, 63} <= set(ids) and sampling.temperature != 1 and sampling.max_tokens >= 4

    (only,) = smallest(Engine(wrong, at=3), crowd(tuple(range(80))))
    assert set(only.prompt.token_ids) >= {17, 63}
    assert len(only.prompt.token_ids) < 10
    assert (only.sampling.max_tokens, only.sampling.temperature, only.sampling.top_p) == (4, 0.7, 1.0)


@pytest.mark.parametrize("needed", [2, 3, 5, 8])
def test_a_fault_of_the_batch_keeps_its_company(needed):
    found = smallest(Engine(lambda requests: len(requests) >= needed), crowd((1, 2, 3)))
    assert needed <= len(found) < 2 * needed


def test_a_length_stays_above_its_threshold():
    (only,) = smallest(
        Engine(lambda requests: len(requests[0].prompt.token_ids) > 64), crowd(tuple(range(129)))
    )
    assert len(only.prompt.token_ids) == 65


def test_neighbours_are_left_out_before_anything_else_is_asked():
    engine = Engine(lambda requests: True)
    reduce(crowd((1,)), engine, most_questions=2)
    assert engine.asked == 2


def test_least_tokens_never_exceed_the_most():
    asked = SamplingParams(max_tokens=20, min_tokens=10)
    found = reduce((request(1, sampling=asked),), Engine(lambda requests: True, at=4))
    assert found is not None
    assert (found[0].sampling.max_tokens, found[0].sampling.min_tokens) == (5, 5)


def test_the_salt_of_a_prompt_is_kept():
    salted = Request(Prompt((1, 2, 3), cache_salt="mine"), ASKED)
    (only,) = smallest(Engine(lambda requests: True), (salted,))
    assert only.prompt.cache_salt == "mine"

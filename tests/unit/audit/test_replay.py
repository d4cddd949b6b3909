"""A case sent again: right where the engine is, wrong where it is not, and never a traceback for a bad answer."""

import pytest

from zerodrift.audit.reduce import reduce
from zerodrift.audit.replay import Replay
from zerodrift.core.completion import Answer, Problem
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.faults.registry import resolve

REQUEST = Request(Prompt(tuple(range(10, 80))), SamplingParams(temperature=0.7, max_tokens=6, seed=1))


def test_a_healthy_engine_answers_rightly(llama):
    replayed = Replay(llama, llama, 1e-4)((REQUEST,))
    assert replayed.first_bad is None
    assert len(replayed.tokens) == 6
    for _, reported, contracted in replayed.tokens:
        assert reported == pytest.approx(contracted, abs=1e-4)


def test_a_fault_beyond_position_64_is_reduced_to_it(llama):
    """Prompt and the answered tokens that can be seen together just reach the position."""
    engine = resolve("path/context-boundary:page-64").inject(llama)
    replay = Replay(engine, llama, 1e-4)
    assert replay((REQUEST,)).first_bad == 0
    smallest = reduce((REQUEST, Request(Prompt((5,)))), replay.first_bad)
    assert smallest is not None
    (only,) = smallest
    reached = len(only.prompt.token_ids) + only.sampling.max_tokens
    assert 65 <= reached <= 67
    assert replay.first_bad(smallest) == only.sampling.max_tokens - 1


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda make: Answer(()), "no sample came back"),
        (lambda make: Answer((), (Problem("engine/bad-answer", "a null logprob"),)), "a null logprob"),
        (lambda make: Answer((make((9, 9), (7,), (-1.0,)),)), "another prompt"),
    ],
)
def test_an_answer_that_cannot_be_used_is_wrong_from_the_start(scripted, completion, llama, answer, problem):
    engine = scripted(lambda request, number: answer(completion))
    replayed = Replay(engine, llama, 1e-4)((REQUEST,))
    assert (replayed.first_bad, replayed.tokens) == (0, [])
    assert problem in replayed.problem

"""Ratios are arithmetic on a clock that these contenders set; ours do the work on a tiny model."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from zerodrift import models
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.bench import throughput
from zerodrift.bench.throughput import (
    EXACT,
    PLAIN_OPS,
    AuditedEngine,
    Contender,
    OurEngine,
    Served,
    Spread,
    check,
    compare,
    mixed,
)
from zerodrift.core.completion import Answer, Problem
from zerodrift.core.errors import BadAnswer, InvalidValue
from zerodrift.core.request import Request

ASKED = mixed(3, 512, 512, 8)
TOKENS = sum(request.sampling.max_tokens for request in ASKED)


def served(request: Request, logprob: float = -1.0) -> Served:
    count = request.sampling.max_tokens
    return Served((1,) * count, (logprob,) * count)


class Fake:
    """Takes the times that it is told, and says when it is asked."""

    def __init__(self, name: str, times: Sequence[float], clock: SimpleNamespace) -> None:
        self.name, self._times, self._clock = name, iter(times), clock

    def serve(self, requests: Sequence[Request]) -> list[Served]:
        self._clock.turns.append(self.name)
        self._clock.now += next(self._times)
        return [served(request) for request in requests]


@pytest.fixture
def clock(monkeypatch):
    """Stands still unless a contender sets it."""
    clock = SimpleNamespace(now=0.0, turns=[])
    clock.perf_counter, clock.process_time = lambda: clock.now, lambda: clock.now / 2
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def test_turns_are_taken_and_ratios_are_within_a_round(clock):
    # The machine slows down threefold in the last round, for all: the ratio of medians would be 2.
    contenders = [Fake(EXACT, [1, 2, 3], clock), Fake("vllm", [4, 4, 12], clock)]
    contenders.append(Fake(next(iter(PLAIN_OPS)), [2, 2, 3], clock))
    rounds: list[int] = []
    exact, other, plain = compare(
        contenders, 3, lambda turn: rounds.append(turn) or ASKED, lambda _done, _total: None
    )
    assert clock.turns == [contender.name for contender in contenders] * 3
    assert rounds == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert exact.speed == Spread(TOKENS / 2, TOKENS / 3, TOKENS / 1)
    assert exact.tokens_per_second == (TOKENS / 1, TOKENS / 2, TOKENS / 3)
    assert (exact.ratio, exact.processor_ratio) == (None, None)
    assert (other.ratio, other.processor_ratio) == (Spread(4, 2, 4), None)
    assert plain.ratio == plain.processor_ratio == Spread(1, 1, 2)
    (alone,) = compare([Fake("vllm", [1], clock)], 1, lambda _: ASKED, lambda _done, _total: None)
    assert alone.ratio is None


@pytest.mark.parametrize(
    "wrong",
    [
        [served(ASKED[0])],
        [*map(served, ASKED[:2]), Served((1,), (-1.0,))],
        [*map(served, ASKED[:2]), served(ASKED[2], math.nan)],
        [served(ASKED[0], 0.5), *map(served, ASKED[1:])],
    ],
)
def test_nobody_is_fast_by_doing_less(wrong):
    check("somebody", ASKED, [served(request) for request in ASKED])
    with pytest.raises(BadAnswer):
        check("somebody", ASKED, wrong)


def test_the_same_lengths_every_time_and_other_tokens_in_every_turn():
    requests = mixed(400, 100, 512)
    assert mixed(3, 100, 512)[0] == requests[0]
    prompts = [request.prompt.token_ids for request in requests]
    for lengths in (list(map(len, prompts)), [request.sampling.max_tokens for request in requests]):
        assert 16 <= min(lengths) < 20
        assert 250 < max(lengths) <= 256
        assert len(set(lengths)) > 150
    assert {token for prompt in prompts for token in prompt} == set(range(100))
    again = mixed(400, 100, 512, turn=1)
    assert [each.sampling for each in again] == [each.sampling for each in requests]
    assert [len(each.prompt.token_ids) for each in again] == list(map(len, prompts))
    assert not {each.prompt.token_ids[:8] for each in again} & {prompt[:8] for prompt in prompts}
    for whole, short in zip(requests, mixed(400, 100, 512, 20), strict=True):
        assert short.sampling.max_tokens == max(1, whole.sampling.max_tokens // 20)
    for count, context in ((0, 512), (1, 511)):
        with pytest.raises(InvalidValue):
            mixed(count, 100, context)


def test_each_does_the_work_and_reports_the_logprobs_of_what_it_drew():
    model = models.load("testbed:llama")
    ours = [OurEngine(name, model) for name in (EXACT, *PLAIN_OPS)]
    assert [each._engine.fingerprint().numeric["attention"] == "sdpa" for each in ours] == [False, True, True]
    assert type(model.lm_head) is torch.nn.Linear, "the vanilla model came back as it was"
    contenders: list[Contender] = [*ours, AuditedEngine(ReferenceBackend("testbed:llama", dtype="float32"))]
    for contender in contenders:
        found = contender.serve(ASKED)
        check(contender.name, ASKED, found)
        for request, each in zip(ASKED, found, strict=True):
            prompt = request.prompt.token_ids
            with torch.no_grad():
                rows = model(torch.tensor([[*prompt, *each.token_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = rows.log_softmax(-1).gather(-1, torch.tensor(each.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(each.logprobs), expected, atol=1e-4, rtol=0)


def test_an_answer_with_a_problem_is_none():
    broken = SimpleNamespace(name="broken", generate=lambda _: [Answer((), (Problem("a/b", "torn"),))])
    with pytest.raises(BadAnswer):
        AuditedEngine(broken).serve(ASKED)

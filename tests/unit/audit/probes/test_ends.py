"""Stop tokens that come too rarely, in engines whose every number is right."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from zerodrift.audit.probes.ends import LikelyEnds
from zerodrift.audit.prompts import before_ends
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer
from zerodrift.core.errors import CapabilityMissing, EngineRefused
from zerodrift.core.request import Request, SamplingParams
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.evidence import EndsEvidence
from zerodrift.records.verdict import Outcome

BAND = 2.5e-5


class Reluctant(FaultyBackend):
    """Draws again, with another seed, in some of the cases in which it would have ended."""

    def __init__(self, inner: Any, stops: Sequence[int], share: float) -> None:
        super().__init__(inner)
        self._stops, self._share, self._rng = stops, share, np.random.default_rng(7)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        answers = self.inner.generate(requests)
        other = self.inner.generate([_reseeded(request) for request in requests])
        return [
            msgspec.structs.replace(
                answer, completions=tuple(map(self._kept, answer.completions, more.completions))
            )
            for answer, more in zip(answers, other, strict=True)
        ]

    def _kept(self, first: Any, second: Any) -> Any:
        ended = first.token_ids[-1] in self._stops
        return second if ended and self._rng.random() < self._share else first


class Unnumbered(FaultyBackend):
    """Reports one and the same number of every stop token."""

    def __init__(self, inner: Any, stops: Sequence[int], number: float) -> None:
        super().__init__(inner)
        self._stops, self._number = stops, number

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return [
            msgspec.structs.replace(answer, completions=tuple(map(self._told, answer.completions)))
            for answer in self.inner.generate(requests)
        ]

    def _told(self, one: Any) -> Any:
        numbers = zip(one.token_ids, one.logprobs, strict=True)
        told = tuple(self._number if token in self._stops else number for token, number in numbers)
        return msgspec.structs.replace(one, logprobs=told)


def _reseeded(request: Request) -> Request:
    sampling = msgspec.structs.replace(request.sampling, seed=(request.sampling.seed or 0) + 10**6)
    return msgspec.structs.replace(request, sampling=sampling)


class WithoutBias(FaultyBackend):
    """Refuses a bias, as a server may."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        if any(request.sampling.logit_bias for request in requests):
            raise EngineRefused("400: logit_bias")
        return self.inner.generate(requests)


def ends(engine: Any, llama: ReferenceBackend, **sampling: Any) -> LikelyEnds:
    params = SamplingParams(max_tokens=8, **sampling)
    return LikelyEnds(engine, llama, params, (), BAND, seed=3)


def test_a_sound_engine_ends_as_often_as_it_should(llama):
    result = ends(llama, llama).ask()
    assert (result.status, result.causes) == (Outcome.PASS, ())
    assert isinstance(result.evidence, EndsEvidence)
    assert result.evidence.due >= 100
    (power,) = result.evidence.power
    assert power.seen_from is not None
    assert power.seen_from >= 0.5


@pytest.mark.parametrize("number", [0.0, -9.0])
def test_an_end_without_a_logprob_of_its_own_is_found(llama, number):
    """In an engine that draws ends as often as it should."""
    result = ends(Unnumbered(llama, llama.facts.eos_token_ids, number), llama).ask()
    (cause,) = result.causes
    assert (result.status, cause.cause, cause.gating) == (Outcome.FAIL, "semantic/eos", True)


def test_an_end_that_is_avoided_is_found(llama):
    """Of the ends 85 in 100 are drawn again: beyond what the power line promises to see."""
    result = ends(Reluctant(llama, llama.facts.eos_token_ids, 0.85), llama).ask()
    (cause,) = result.causes
    assert (result.status, cause.cause, cause.gating) == (Outcome.FAIL, "semantic/sampling-bias", True)


def test_an_engine_that_takes_no_bias_is_asked_without(llama):
    result = ends(WithoutBias(llama), llama, temperature=0.6).ask()
    assert isinstance(result.evidence, EndsEvidence)
    assert (result.status, result.evidence.bias) == (Outcome.PASS, None)


def test_nothing_is_drawn_at_temperature_0(llama):
    result = ends(llama, llama, temperature=0.0).ask()
    assert (result.status, result.required) == (Outcome.INCONCLUSIVE, False)


def test_finished_exchanges_end_before_a_stop_token(llama):
    (mark,) = llama.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    prefixes = before_ends(llama.tokenizer, [mark])
    assert all(prefix and prefix[-1] != mark for prefix in prefixes)
    whole, last = prefixes[:2]
    assert whole[-len(last) :] == last
    assert mark in whole
    assert mark not in last


class OneAtOnce(FaultyBackend):
    """Draws no two samples of a request, as a server with one slot."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        if any(request.sampling.n > 1 for request in requests):
            raise CapabilityMissing("one at a time")
        return self.inner.generate(requests)


def test_an_engine_that_draws_one_sample_at_a_time(llama):
    """The same seeds in other requests, a quarter of them: each costs as much as many samples of one request."""
    whole, single = ends(llama, llama).ask(), ends(OneAtOnce(llama), llama).ask()
    assert isinstance(whole.evidence, EndsEvidence)
    assert isinstance(single.evidence, EndsEvidence)
    assert (single.status, single.evidence.draws) == (Outcome.PASS, whole.evidence.draws // 4)


@pytest.mark.parametrize("seeded", [True, False])
def test_no_two_samples_share_a_seed(llama, seeded):
    asked: list[Request] = []

    class Noting(FaultyBackend):
        def generate(self, requests):
            asked.extend(requests)
            return [Answer(()) for _ in requests]

    probe = LikelyEnds(Noting(llama), llama, SamplingParams(max_tokens=8), (), BAND, 3, seeded)
    assert probe.ask().status is Outcome.INCONCLUSIVE
    seeds = [request.sampling.seed for request in asked]
    if not seeded:
        assert set(seeds) == {None}
        return
    drawn = [
        seed + index
        for seed, each in zip(seeds, asked, strict=True)
        if seed is not None
        for index in range(each.sampling.n)
    ]
    assert len(drawn) == len(set(drawn))
    assert {request.sampling.max_tokens for request in asked} == {1}

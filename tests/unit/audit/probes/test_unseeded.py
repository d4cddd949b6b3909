"""Requests without a seed: engines that make one of what was sent, beside one that draws anew."""

import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from zerodrift.audit.plan import probe_requests
from zerodrift.audit.probes.unseeded import unseeded, won
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.evidence import AnewEvidence
from zerodrift.records.verdict import Outcome


class OwnSeed(FaultyBackend):
    """A seed for requests that have none: always the same, or made of the prompt."""

    of_prompt = True

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return self.inner.generate([self._seeded(each) for each in requests])

    def _seeded(self, request: Request) -> Request:
        if request.sampling.seed is not None:
            return request
        seed = zlib.crc32(repr(request.prompt.token_ids).encode()) if self.of_prompt else 11
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed))


class UsedTwice(FaultyBackend):
    """Without a seed tokens race by times of their own, as vLLM draws them, and every second one by those of the one before."""

    rng = np.random.default_rng(7)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        answers = self.inner.generate(requests)
        return [
            answer if request.sampling.seed is not None else self._raced(request, answer, self.rng)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _raced(self, request: Request, answer: Answer, rng: np.random.Generator) -> Answer:
        ids, told, times = list(request.prompt.token_ids), [], np.zeros(1)
        for index in range(request.sampling.max_tokens):
            (logits_TV,) = self.inner.teacher.logits([[*ids, 0]], [len(ids)])
            logprobs = (logits_TV[0].double() / request.sampling.temperature).log_softmax(dim=-1).numpy()
            times = times if index % 2 else rng.exponential(size=len(logprobs))
            ids.append(int((times / np.exp(logprobs)).argmin()))
            told.append(float(logprobs[ids[-1]]))
        (one,) = answer.completions
        output = tuple(ids[len(request.prompt.token_ids) :])
        return Answer((msgspec.structs.replace(one, token_ids=output, logprobs=tuple(told)),))


@pytest.fixture
def requests(llama):
    return probe_requests(llama.facts.vocab_size, 200, llama.tokenizer.all_special_ids, 3, 6, 60)


def test_an_engine_that_draws_anew_passes(llama, requests):
    for _ in range(5):
        result = unseeded(llama, llama, requests)
        assert result.status is Outcome.PASS, result.message
        # The same every time: nothing of it is drawn by the audit's seed.
        assert result.evidence == AnewEvidence(pairs=6)


@pytest.mark.parametrize("of_prompt", [True, False])
def test_a_seed_that_nobody_asked_for_is_seen(llama, requests, of_prompt):
    engine = OwnSeed(llama)
    engine.of_prompt = of_prompt
    result = unseeded(engine, llama, requests)
    assert result.status is Outcome.FAIL
    (cause,) = result.causes
    assert cause.cause == "semantic/seed"
    assert cause.gating
    assert result.evidence == AnewEvidence(pairs=6, equal=6, log_e=result.evidence.log_e)


def test_noise_that_serves_two_tokens_is_seen(llama, requests):
    result = unseeded(UsedTwice(llama), llama, requests)
    assert result.status is Outcome.FAIL
    (cause,) = result.causes
    assert cause.cause in ("semantic/seed", "semantic/sampling-bias")
    assert cause.gating
    assert "before" in cause.evidence


def test_bets_are_fair(llama, requests):
    """Of samples that owe each other nothing the mean of what is won is one, or less."""
    answers = llama.generate(
        [
            msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, n=16, max_tokens=2))
            for each in requests
        ]
    )
    wins = [
        np.exp(won(one, other))
        for answer in answers
        for one, other in zip(answer.completions[::2], answer.completions[1::2], strict=True)
    ]
    assert np.mean(wins) < 1.5

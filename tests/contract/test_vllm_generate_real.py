"""Are vLLM's two routes the same engine? Asked of a real server, with the same seeds."""

import contextlib

import opened
import pytest

from zerodrift import models
from zerodrift.backends.base import Capability
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_generate import FLAG
from zerodrift.core.request import Prompt, Request, SamplingParams


def ask(*ids, **sampling):
    return Request(Prompt(ids), SamplingParams(**({"max_tokens": 8} | sampling)))


REQUESTS = [
    ask(5, 6, seed=3, n=2, logprobs=4),
    ask(9, 8, 7, seed=40, temperature=0.7, top_p=0.9, logit_bias={7: 2.0}),
    ask(11, 12, seed=1, temperature=0.0, prompt_logprobs=0, repetition_penalty=1.2),
]


@pytest.mark.parametrize(
    "release", [pytest.param(name, marks=opened.MARKS[name]) for name in opened.GENERATES.values()]
)
def test_both_routes_give_the_same_tokens_and_the_same_bits(release, tmp_path):
    model = models.materialise(opened.MODEL, tmp_path / "model")
    seen = []
    with opened.vllm_server(release, model, tmp_path / "log", FLAG) as server:
        for route in ("completions", "generate"):
            with contextlib.closing(VllmBackend(server.url, route=route, timeout_s=120)) as backend:
                assert backend.capabilities == frozenset(Capability)
                # One at a time, so that both are computed in the same batches.
                answers = [backend.generate([request])[0] for request in REQUESTS]
                seen.append((answers, backend.score([(5, 6, 7, 8)])))

    (completed, scores), (generated, scores_too) = seen
    assert scores == scores_too
    for answer, other in zip(completed, generated, strict=True):
        assert answer.problems == other.problems == ()
        for mine, its in zip(answer.completions, other.completions, strict=True):
            assert (mine.token_ids, mine.logprobs) == (its.token_ids, its.logprobs)
            assert mine.top_logprobs == its.top_logprobs
            assert mine.prompt_logprobs == its.prompt_logprobs
            assert mine.finish_reason == its.finish_reason
            assert mine.versions == its.versions

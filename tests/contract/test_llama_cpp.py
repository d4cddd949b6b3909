"""The adapter of llama.cpp, beyond what adapters promise alike (test_servers.py)."""

import math
import struct
from typing import Any

import pytest
from asking import ask, one, only
from pretend import LlamaCpp

from zerodrift.backends.base import Capability
from zerodrift.backends.llama_cpp import LlamaCppBackend
from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.errors import BadAnswer, CapabilityMissing, InvalidSampling, NonFinite

LOWEST = struct.unpack("f", b"\xff\xff\x7f\xff")[0]
"""What llama.cpp writes for the logarithm of zero."""


@pytest.fixture
def server(loopback):
    return LlamaCpp(loopback)


@pytest.fixture
def connect(server, closing):
    def connect(**options):
        backend: LlamaCppBackend = closing(LlamaCppBackend(server.url, **options))
        server.calls.clear()
        return backend

    return connect


def entries(samples: list[Any]) -> list[dict[str, Any]]:
    return [entry for sample in samples for entry in sample["completion_probabilities"]]


def drop_samplers(server: LlamaCpp) -> None:
    del server.defaults["samplers"]


@pytest.mark.parametrize(
    ("spoil", "lost"),
    [
        (lambda server: setattr(server, "cached_tokens", None), Capability.CACHED_TOKENS),
        (drop_samplers, Capability.EFFECTIVE_CONFIG),
        (lambda server: server.answers(404, path="/apply-template"), Capability.TOKENIZE),
        (lambda server: server.answers(500, lambda body: body.get("seed") == "?"), Capability.SEED),
        (
            lambda server: setattr(
                server, "spoil", lambda samples: [entry.update(top_probs=[]) for entry in entries(samples)]
            ),
            Capability.TOP_LOGPROBS,
        ),
    ],
)
def test_what_is_not_shown_is_no_capability(server, connect, spoil, lost):
    spoil(server)
    assert connect().capabilities == server.whole - {lost}


@pytest.mark.parametrize(
    ("route", "answer"),
    [("GET /props", {"name": "something else"}), ("POST /completion", []), ("POST /completion", {})],
)
def test_another_kind_of_server(server, connect, route, answer):
    server.routes[route] = lambda *_: (200, answer)
    with pytest.raises(BadAnswer):
        connect()


def test_a_release_without_probabilities_after_sampling(server, connect):
    complete = server.complete

    def older(call, handler):
        call.body.pop("post_sampling_probs", None)
        return complete(call, handler)

    server.routes["POST /completion"] = older

    with pytest.raises(CapabilityMissing, match=r"--set engine\.logprobs_mode=raw_logprobs"):
        connect()
    assert only(connect(kind=LogprobKind.RAW), ask(1)).kind is LogprobKind.RAW


def test_the_fingerprint_is_what_the_server_shows(connect):
    facts = connect().fingerprint()

    assert facts.engine == "llama-cpp"
    assert facts.semantic["logprobs_mode"] == "processed_logprobs"
    assert facts.semantic["top_p"] == "0.95"
    assert facts.numeric == {"dtype": "float32", "quantization": "Q4_0", "speculative": "none", "build": "b1"}
    assert facts.deployment == {"max_model_len": "64", "max_num_seqs": "4"}


def test_what_differs_from_its_default_is_sent(server, connect):
    one(connect(kind=LogprobKind.RAW), ask(5, top_k=9, min_p=0.1, logprobs=3, logit_bias={7: 1.5}))

    [call] = server.calls
    told = {name: call.body[name] for name in ("top_k", "min_p", "n_probs", "logit_bias")}
    assert told == {"top_k": 9, "min_p": 0.1, "n_probs": 3, "logit_bias": {"7": 1.5}}
    assert "post_sampling_probs" not in call.body


@pytest.mark.parametrize(
    ("sampling", "error"),
    [
        ({"repetition_penalty": 1.1}, CapabilityMissing),
        ({"presence_penalty": 0.5}, CapabilityMissing),
        ({"min_tokens": 1}, CapabilityMissing),
        ({"stop_token_ids": (3,)}, CapabilityMissing),
        ({"stop": ("x",)}, CapabilityMissing),
        ({"ignore_eos": True}, CapabilityMissing),
        ({"prompt_logprobs": 0}, CapabilityMissing),
        ({"n": 5}, CapabilityMissing),
        ({"salt": "s"}, CapabilityMissing),
        ({"seed": 2**32 - 1}, InvalidSampling),
        ({"seed": 2**32 - 2, "n": 2}, InvalidSampling),
        ({"logprobs": None}, InvalidSampling),
    ],
)
def test_what_would_be_ignored_or_mean_something_else(server, connect, sampling, error):
    backend = connect()
    with pytest.raises(error):
        backend.generate([ask(1, **sampling)])
    assert server.calls == []


def test_a_greedy_answer_carries_the_models_own_logprobs(server, connect):
    """After a greedy sampler every probability is 1, and says nothing."""
    completion = only(connect(), ask(5, temperature=0))

    assert completion.kind is LogprobKind.RAW
    assert completion.logprobs == (-0.5, -1.0)
    assert "post_sampling_probs" not in server.calls[0].body


def test_probabilities_after_sampling_become_logprobs(server, connect):
    completion = only(connect(), ask(5))
    assert completion.kind is LogprobKind.PROCESSED
    assert completion.logprobs == (math.log(math.exp(-0.5)), math.log(math.exp(-1.0)))


@pytest.mark.parametrize(("word", "reason"), [("eos", FinishReason.STOP), ("limit", FinishReason.LENGTH)])
def test_how_it_ended(server, connect, word, reason):
    backend = connect()
    server.spoil = lambda samples: samples[0].update(stop_type=word)
    assert only(backend, ask(1)).finish_reason is reason


def test_the_number_for_a_logarithm_of_zero_is_no_logprob(server, connect):
    backend = connect(kind=LogprobKind.RAW)
    server.spoil = lambda samples: entries(samples)[0].update(logprob=LOWEST)
    assert [problem.code for problem in one(backend, ask(1)).problems] == [NonFinite.code]

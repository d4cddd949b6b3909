"""OpenAIBackend against a small server that speaks llama.cpp's documented format, and against hostile variants of it."""

import contextlib
import json
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import ask, one, only

from zerodrift.backends.base import Capability
from zerodrift.backends.dialects.llama_cpp import LLAMA_CPP
from zerodrift.backends.openai import OpenAIBackend
from zerodrift.backends.registry import ServedModel, open_engine
from zerodrift.config.engine import EngineConfig
from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.errors import (
    BadAnswer,
    CapabilityMissing,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    InvalidCompletion,
    InvalidPrompt,
    InvalidSampling,
    NonFinite,
    ZerodriftError,
)
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion

WHOLE = {
    Capability.TOP_LOGPROBS,
    Capability.SEED,
    Capability.TOKENIZE,
    Capability.CACHED_TOKENS,
    Capability.EFFECTIVE_CONFIG,
    Capability.STREAM,
}
LOWEST = struct.unpack("f", b"\xff\xff\x7f\xff")[0]
"""What llama.cpp writes for the logarithm of zero."""


class LlamaCpp:
    """State of the pretended server; tests change it before they connect, or after."""

    def __init__(self, loopback: Any) -> None:
        self.url = loopback.url
        self.calls = loopback.calls
        self.routes = loopback.routes
        self.models = ["tiny.gguf"]
        self.slots = 4
        self.context = 64
        self.strict = {"seed", "n_probs"}
        self.spoil: Callable[[Any], None] = lambda samples: None
        self.spoil_stream: Callable[[list[Any]], None] = lambda pieces: None
        self.defaults: dict[str, Any] = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0}
        self.defaults |= {"samplers": ["top_k"], "repeat_penalty": 1.0, "mirostat": 0, "lora": []}
        self.defaults |= {"speculative.types": "none"}
        self.routes |= {
            "GET /v1/models": lambda *_: (200, {"data": [{"id": name} for name in self.models]}),
            "GET /props": lambda *_: (200, self.props()),
            "POST /completion": self.complete,
            "POST /tokenize": lambda call, _: (200, {"tokens": list(call.body["content"].encode())}),
            "POST /apply-template": self.render,
        }

    def props(self) -> dict[str, Any]:
        settings = {"params": self.defaults, "n_ctx": self.context}
        shown = {"model_ftype": "Q4_0", "build_info": "b1", "total_slots": self.slots}
        return {"default_generation_settings": settings, **shown}

    def render(self, call: Any, handler: Any) -> tuple[int, Any]:
        return 200, {
            "prompt": "".join(f"<{each['role']}>{each['content']}" for each in call.body["messages"])
        }

    def complete(self, call: Any, handler: Any) -> tuple[int, Any] | None:
        body = call.body
        for name in self.strict:
            if not isinstance(body.get(name, 0), int):
                message = f"Field '{name}': type must be number, but is string"
                return 400, {"error": {"code": 400, "message": message, "type": "invalid_request_error"}}
        samples = [self.sample(body, index) for index in range(body.get("n", 1))]
        self.spoil(samples)
        if body.get("stream"):
            pieces = [piece for sample in samples for piece in self.pieces(sample)]
            self.spoil_stream(pieces)
            handler.stream([b"data: %s\n\n" % json.dumps(piece).encode() for piece in pieces])
            return None
        return 200, samples if len(samples) > 1 else samples[0]

    def pieces(self, sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A token at a time, and at the end all that is known of the sample but its tokens."""
        for place, token in enumerate(sample["tokens"]):
            yield {
                "index": sample["index"],
                "content": sample["content"] if place == 0 else "",
                "tokens": [token],
                "stop": False,
                "tokens_predicted": place + 1,
                "tokens_evaluated": sample["tokens_evaluated"],
                "completion_probabilities": sample["completion_probabilities"][place : place + 1],
            }
        last = {name: value for name, value in sample.items() if name != "completion_probabilities"}
        yield last | {"content": "", "tokens": [], "stop": True}

    def sample(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        """Token i of sample s after a prompt that ends in p is 10·s + p + i, with probability 1 / (i + 2)."""
        tokens = [10 * index + body["prompt"][-1] + i for i in range(body["n_predict"])]
        after = body.get("post_sampling_probs", False)
        word, tops = ("prob", "top_probs") if after else ("logprob", "top_logprobs")
        told = [1 / (i + 2) if after else -math.log(i + 2) for i in range(len(tokens))]
        others = [
            {"id": 500 + rank, word: (0.5 if after else -0.7) / (rank + 1)} for rank in range(body["n_probs"])
        ]
        others = others if after else sorted(others, key=lambda other: -other[word])
        entries = [{"id": t, word: v, tops: list(others)} for t, v in zip(tokens, told, strict=True)]
        sample = {"index": index, "content": "…", "tokens": tokens if body.get("return_tokens") else []}
        sample |= {"tokens_evaluated": len(body["prompt"]), "truncated": False, "stop_type": "limit"}
        sample["tokens_predicted"] = len(tokens)
        return sample | {"completion_probabilities": entries, "timings": {"cache_n": 2, "prompt_n": 1}}


@pytest.fixture
def server(loopback: Any) -> LlamaCpp:
    return LlamaCpp(loopback)


Connect = Callable[..., OpenAIBackend]


@pytest.fixture
def connect(server: LlamaCpp, closing: Callable[[Any], Any]) -> Connect:
    def connect(**options: Any) -> OpenAIBackend:
        backend: OpenAIBackend = closing(OpenAIBackend(server.url, LLAMA_CPP, **options))
        server.calls.clear()
        return backend

    return connect


# What the server can do


def test_a_whole_server(connect: Connect) -> None:
    backend = connect()

    assert backend.capabilities == WHOLE
    assert set(LLAMA_CPP.hints) == set(Capability)
    assert (backend.name, backend.model, backend.max_model_len) == ("llama-cpp", "tiny.gguf", 64)


def test_what_it_lacks_is_refused_with_a_way_out(server: LlamaCpp, connect: Connect, tmp_path: Any) -> None:
    del server.routes["POST /tokenize"]
    backend = connect()

    assert backend.capabilities == WHOLE - {Capability.TOKENIZE}
    for call, says in [
        (lambda: backend.tokenize("a"), "/tokenize"),
        (lambda: backend.render_chat([]), "tokenize"),
        (lambda: backend.score([[1, 2]]), "score"),
        (lambda: backend.load_weights(tmp_path, WeightVersion("x")), "load-weights"),
        (backend.reset_cache, "--no-cache-prompt"),
        (lambda: backend.generate([ask(1, salt="s")]), "--no-cache-prompt"),
    ]:
        with pytest.raises(CapabilityMissing) as caught:
            call()
        assert says in str(caught.value)


def test_a_seed_that_is_ignored_is_no_capability(server: LlamaCpp, connect: Connect) -> None:
    server.strict.remove("seed")
    backend = connect()

    assert backend.capabilities == WHOLE - {Capability.SEED}
    with pytest.raises(CapabilityMissing):
        backend.generate([ask(1, seed=1)])


@pytest.mark.parametrize(
    ("path", "lost"),
    [("timings", Capability.CACHED_TOKENS), ("tops", Capability.TOP_LOGPROBS)],
)
def test_what_the_answers_do_not_show(
    server: LlamaCpp, connect: Connect, path: str, lost: Capability
) -> None:
    def spoil(samples: Any) -> None:
        for sample in samples:
            if path == "timings":
                del sample["timings"]
            for entry in sample["completion_probabilities"]:
                entry["top_probs"] = [] if path == "tops" else entry["top_probs"]

    server.spoil = spoil

    assert connect().capabilities == WHOLE - {lost}


def test_settings_that_are_not_shown(server: LlamaCpp, connect: Connect) -> None:
    del server.defaults["samplers"]
    backend = connect()

    assert Capability.EFFECTIVE_CONFIG not in backend.capabilities
    assert "samplers" not in backend.fingerprint().semantic


@pytest.mark.parametrize(
    ("asked", "status", "error"),
    [
        ("seed", 401, EngineRefused),
        ("seed", 429, EngineRefused),
        ("seed", 503, EngineUnreachable),
        ("stream", 403, EngineRefused),
        ("stream", 429, EngineRefused),
        ("stream", 500, EngineError),
        ("stream", 504, EngineUnreachable),
        ("tokenize", 429, EngineRefused),
        ("tokenize", 503, EngineUnreachable),
    ],
)
def test_a_failure_of_the_moment_is_no_missing_capability(
    server: LlamaCpp, connect: Connect, asked: str, status: int, error: type[EngineError]
) -> None:
    complete = server.complete

    def fail(call: Any, handler: Any) -> Any:
        if call.path == "/completion" and not (
            call.body.get("stream") if asked == "stream" else call.body.get("seed") == "?"
        ):
            return complete(call, handler)
        handler.send(status, {"error": {"message": "not now"}}, retry_after="0")
        return None

    server.routes["POST /tokenize" if asked == "tokenize" else "POST /completion"] = fail

    with pytest.raises(error, match="not now"):
        connect()


@pytest.mark.parametrize("status", [400, 404, 405, 422, 501])
def test_a_refusal_is_a_missing_capability(server: LlamaCpp, connect: Connect, status: int) -> None:
    complete = server.complete
    refused = (status, {"error": {"message": "never"}})
    server.routes["POST /completion"] = lambda call, handler: (
        refused if call.body.get("stream") else complete(call, handler)
    )
    server.routes["POST /apply-template"] = lambda *_: refused

    assert connect().capabilities == WHOLE - {Capability.STREAM, Capability.TOKENIZE}


def test_a_template_that_raises_and_a_field_that_is_fallen_over(server: LlamaCpp, connect: Connect) -> None:
    """Both are a plain 500 of a server that is well."""
    complete = server.complete
    failed = (500, {"error": {"message": "raised"}})
    server.routes["POST /completion"] = lambda call, handler: (
        failed if call.body.get("seed") == "?" else complete(call, handler)
    )
    server.routes["POST /apply-template"] = lambda *_: failed

    assert connect().capabilities == WHOLE - {Capability.SEED, Capability.TOKENIZE}


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda samples: samples[0].update(tokens=[]), CapabilityMissing),
        (lambda samples: samples.__setitem__(0, []), BadAnswer),
    ],
)
def test_no_ids_no_audit(server: LlamaCpp, connect: Connect, spoil: Any, error: type[EngineError]) -> None:
    server.spoil = spoil

    with pytest.raises(error):
        connect()


def test_a_release_without_probabilities_after_sampling(server: LlamaCpp, connect: Connect) -> None:
    complete = server.complete

    def older(call: Any, handler: Any) -> Any:
        call.body.pop("post_sampling_probs", None)
        return complete(call, handler)

    server.routes["POST /completion"] = older

    with pytest.raises(CapabilityMissing, match=r"--set engine\.logprobs_mode=raw_logprobs"):
        connect()
    assert only(connect(kind=LogprobKind.RAW), ask(1)).kind is LogprobKind.RAW


def test_the_fingerprint_is_what_the_server_shows(connect: Connect) -> None:
    facts = connect().fingerprint()

    assert facts.engine == "llama-cpp"
    assert facts.semantic["logprobs_mode"] == "processed_logprobs"
    assert facts.semantic["top_p"] == "0.95"
    assert facts.numeric == {
        "dtype": "float32",
        "quantization": "Q4_0",
        "speculative": "none",
        "build": "b1",
    }
    assert facts.deployment == {"max_model_len": "64", "max_num_seqs": "4"}


def test_a_server_started_anew_with_other_settings_shows_them(server: LlamaCpp, connect: Connect) -> None:
    backend = connect()
    before = backend.fingerprint()
    assert backend.fingerprint() == before

    server.defaults["top_p"] = 0.5
    server.context = 32

    after = backend.fingerprint()
    assert after.semantic["top_p"] == "0.5"
    assert after.deployment["max_model_len"] == "32"
    assert after.digest != before.digest
    assert only(backend, ask(1)).fingerprint == before.digest, "asked of the server that we connected to"


def test_the_model_is_chosen_by_name(server: LlamaCpp, connect: Connect) -> None:
    server.models.append("other.gguf")

    assert connect(model="other.gguf").model == "other.gguf"
    with pytest.raises(EngineRefused):
        connect(model="big")
    with pytest.raises(EngineRefused, match=r"--set engine\.served_model"):
        connect()


def test_another_kind_of_server(server: LlamaCpp, connect: Connect) -> None:
    server.routes["GET /props"] = lambda *_: (200, {"name": "something else"})

    with pytest.raises(BadAnswer):
        connect()


def test_the_address_may_end_in_v1_and_the_key_is_sent(server: LlamaCpp) -> None:
    with contextlib.closing(OpenAIBackend(f"{server.url}/v1/", LLAMA_CPP, api_key="k")) as backend:
        assert backend.model == "tiny.gguf"
    assert {call.headers["authorization"] for call in server.calls} == {"Bearer k"}


# What is sent


def test_a_call_says_what_trainers_say_and_leaves_the_rest_to_the_server(
    server: LlamaCpp, connect: Connect
) -> None:
    one(connect(), ask(5, 6, temperature=0.7, seed=3))

    [call] = server.calls
    assert call.body == {
        "model": "tiny.gguf",
        "prompt": [5, 6],
        "return_tokens": True,
        "temperature": 0.7,
        "n_predict": 2,
        "seed": 3,
        "n": 1,
        "n_probs": 1,
        "post_sampling_probs": True,
    }


def test_what_differs_from_its_default_is_sent(server: LlamaCpp, connect: Connect) -> None:
    one(connect(kind=LogprobKind.RAW), ask(5, top_k=9, top_p=0.5, min_p=0.1, logprobs=3, logit_bias={7: 1.5}))

    [call] = server.calls
    told = {name: call.body[name] for name in ("top_k", "top_p", "min_p", "n_probs", "logit_bias")}
    assert told == {"top_k": 9, "top_p": 0.5, "min_p": 0.1, "n_probs": 3, "logit_bias": {"7": 1.5}}
    assert "post_sampling_probs" not in call.body


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"min_tokens": 1},
        {"stop_token_ids": (3,)},
        {"stop": ("x",)},
        {"ignore_eos": True},
        {"prompt_logprobs": 0},
        {"n": 5},
    ],
)
def test_what_would_be_ignored_or_mean_something_else(
    server: LlamaCpp, connect: Connect, sampling: dict[str, Any]
) -> None:
    backend = connect()
    with pytest.raises(CapabilityMissing) as caught:
        backend.generate([ask(1, **sampling)])
    assert ("--parallel" if "n" in sampling else next(iter(sampling))) in str(caught.value)
    assert server.calls == []


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (ask(1, seed=2**32 - 1), InvalidSampling),
        (ask(1, seed=2**32 - 2, n=2), InvalidSampling),
        (ask(1, logprobs=None), InvalidSampling),
        (ask(*range(63)), InvalidPrompt),
    ],
)
def test_what_cannot_be_asked(connect: Connect, request_: Request, kind: type[ZerodriftError]) -> None:
    with pytest.raises(kind):
        connect().generate([request_])


# What comes back


def test_probabilities_after_sampling_become_logprobs(connect: Connect) -> None:
    completion = only(connect(), ask(5, 6, logprobs=2))

    assert completion.prompt_token_ids == (5, 6)
    assert completion.token_ids == (6, 7)
    assert completion.logprobs == (math.log(1 / 2), math.log(1 / 3))
    assert (completion.kind, completion.finish_reason) == (LogprobKind.PROCESSED, FinishReason.LENGTH)
    assert completion.cached_tokens == 2
    assert [each.token_id for each in completion.top_logprobs[0]] == [500, 501]
    assert completion.top_logprobs[0][1].logprob == math.log(1 / 4)


def test_a_greedy_answer_carries_the_models_own_logprobs(server: LlamaCpp, connect: Connect) -> None:
    """After a greedy sampler every probability is 1, and says nothing."""
    completion = only(connect(), ask(5, temperature=0))

    assert completion.kind is LogprobKind.RAW
    assert completion.logprobs == (-math.log(2), -math.log(3))
    assert "post_sampling_probs" not in server.calls[0].body


def test_samples_are_told_apart_by_their_index(server: LlamaCpp, connect: Connect) -> None:
    server.spoil = lambda samples: samples.reverse()
    answer = one(connect(), ask(5, n=3))

    assert [each.sample_index for each in answer.completions] == [0, 1, 2]
    assert [each.token_ids for each in answer.completions] == [(5, 6), (15, 16), (25, 26)]


def test_no_more_requests_are_sent_together_than_the_server_is_to_have(
    server: LlamaCpp, tmp_path: Path
) -> None:
    lock, complete, flying, most = threading.Lock(), server.complete, [0], [0]

    def count(call: Any, handler: Any) -> Any:
        with lock:
            flying[0] += 1
            most[0] = max(most[0], flying[0])
        time.sleep(0.02)
        with lock:
            flying[0] -= 1
        return complete(call, handler)

    server.routes["POST /completion"] = count
    config = EngineConfig(name="llama-cpp", url=server.url, concurrency=2)
    with open_engine(config, ServedModel("testbed:llama", "auto"), tmp_path) as engine:
        engine.generate([ask(number) for number in range(8)])
    assert most == [2]


@pytest.mark.parametrize(("word", "reason"), [("eos", FinishReason.STOP), ("limit", FinishReason.LENGTH)])
def test_how_it_ended(server: LlamaCpp, connect: Connect, word: str, reason: FinishReason) -> None:
    backend = connect()
    server.spoil = lambda samples: samples[0].update(stop_type=word)

    assert only(backend, ask(1)).finish_reason is reason


def entry(samples: Any, position: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = samples[0]["completion_probabilities"][position]
    return found


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda s: s[0]["completion_probabilities"].pop(), InvalidCompletion),
        (lambda s: s[0].pop("completion_probabilities"), InvalidCompletion),
        (lambda s: s[0]["completion_probabilities"].reverse(), InvalidCompletion),
        (lambda s: entry(s).update(id=99), InvalidCompletion),
        (lambda s: entry(s).update(prob=None), NonFinite),
        (lambda s: entry(s).update(prob=0.0), NonFinite),
        (lambda s: entry(s).update(prob=float("nan")), NonFinite),
        (lambda s: entry(s).update(prob=1.5), NonFinite),
        (lambda s: entry(s).update(prob="1"), BadAnswer),
        (lambda s: entry(s).pop("prob"), BadAnswer),
        (lambda s: entry(s)["top_probs"].reverse(), InvalidCompletion),
        (lambda s: entry(s)["top_probs"].append({"id": 3, "prob": 0.1}), InvalidCompletion),
        (lambda s: entry(s).pop("top_probs"), BadAnswer),
        (lambda s: s[0].pop("tokens"), BadAnswer),
        (lambda s: s[0].update(tokens=["a", "b"]), BadAnswer),
        (lambda s: s[0].update(tokens_evaluated=3), InvalidCompletion),
        (lambda s: s[0].pop("tokens_evaluated"), BadAnswer),
        (lambda s: s[0].update(stop_type="none"), BadAnswer),
    ],
)
def test_a_sample_that_cannot_be_believed_is_a_problem(
    server: LlamaCpp, connect: Connect, spoil: Any, error: type[ZerodriftError]
) -> None:
    backend = connect()
    server.spoil = spoil
    answer = one(backend, ask(1, logprobs=2))

    assert answer.completions == ()
    assert [problem.code for problem in answer.problems] == [error.code]


def test_the_number_for_a_logarithm_of_zero_is_no_logprob(server: LlamaCpp, connect: Connect) -> None:
    backend = connect(kind=LogprobKind.RAW)
    server.spoil = lambda samples: entry(samples).update(logprob=LOWEST)

    assert [problem.code for problem in one(backend, ask(1)).problems] == [NonFinite.code]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.pop(),
        lambda s: s[1].update(index=0),
        lambda s: s[1].pop("index"),
        lambda s: s[1].update(index=None),
    ],
)
def test_samples_that_cannot_be_told_apart(server: LlamaCpp, connect: Connect, spoil: Any) -> None:
    backend = connect()
    server.spoil = spoil

    with pytest.raises(BadAnswer):
        backend.generate([ask(1, n=2)])


def test_text_becomes_ids(connect: Connect) -> None:
    backend = connect()

    assert backend.tokenize("ab") == (97, 98)
    assert backend.render_chat([{"role": "u", "content": "a"}]) == tuple(b"<u>a")


# Streams


@pytest.mark.parametrize("kind", LogprobKind)
def test_what_is_streamed_is_what_comes_whole(connect: Connect, kind: LogprobKind) -> None:
    backend = connect(kind=kind)
    requests = [ask(1, 2, n=3, max_tokens=4, logprobs=2, seed=1), ask(7, max_tokens=4)]

    whole, streamed = backend.generate(requests), backend.stream(requests)

    assert [answer.completions for answer in streamed] == [answer.completions for answer in whole]
    assert [answer.stream_deltas for answer in streamed] == [12, 4]


def test_a_stream_that_is_cut_off_is_unreachable(server: LlamaCpp, connect: Connect) -> None:
    backend = connect()
    server.spoil_stream = lambda pieces: pieces.pop()

    with pytest.raises(EngineUnreachable):
        backend.stream([ask(1)])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pieces: pieces[0].pop("completion_probabilities"),
        # What llama.cpp does with a token that ends inside a character: neither id nor logprob, and nothing looks lost.
        lambda pieces: pieces.pop(0),
    ],
    ids=["logprobs", "ids and logprobs"],
)
def test_what_only_the_stream_loses(server: LlamaCpp, connect: Connect, spoil: Any) -> None:
    backend = connect()
    server.spoil_stream = spoil
    [answer] = backend.stream([ask(1)])

    assert answer.completions == ()
    assert [problem.code for problem in answer.problems] == [InvalidCompletion.code]


def test_streams_without_ids_are_no_capability(server: LlamaCpp, connect: Connect) -> None:
    def lose(pieces: list[Any]) -> None:
        for piece in pieces:
            piece |= {"tokens": [], "completion_probabilities": []}

    server.spoil_stream = lose
    backend = connect()

    assert backend.capabilities == WHOLE - {Capability.STREAM}
    with pytest.raises(CapabilityMissing):
        backend.stream([ask(1)])

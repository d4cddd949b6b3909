"""VllmBackend against a small server that speaks vLLM's documented format, and against hostile variants of it."""

import contextlib
import copy
import json
import shutil
import threading

import pytest
from asking import ask, one
from safetensors.torch import load_file, save_file

from zerodrift import models
from zerodrift.backends.base import Capability
from zerodrift.backends.vllm import HINTS, VllmBackend
from zerodrift.core.completion import FinishReason, LogprobKind, TokenAlternative
from zerodrift.core.errors import (
    BadAnswer,
    CapabilityMissing,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    InvalidPrompt,
    ModelError,
    ModelNotFound,
    NonFinite,
    TruncatedWeights,
    UnsupportedModel,
    ZerodriftError,
)
from zerodrift.core.version import VersionSpan, WeightVersion

NAN_WORDS = "Out of range float values are not JSON compliant"

INFO = {
    "vllm_config": {
        "model_config": {
            "dtype": "torch.float32",
            "logprobs_mode": "processed_logprobs",
            "generation_config": "auto",
            "hf_overrides": {},
            "quantization": None,
        },
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
        "scheduler_config": {"max_num_seqs": 128},
        "parallel_config": {"tensor_parallel_size": 1},
    },
    "vllm_env": {"VLLM_CPU_ATTN_SPLIT_KV": True, "VLLM_CACHE_ROOT": "/somewhere"},
    "system_env": {
        "torch_version": "2.13.0+cpu",
        "cpu_info": "Vendor ID:  X\nModel name:   Fast CPU\nFlags: sse",
        "env_vars": "OMP_NUM_THREADS=2\nHOME=/root",
    },
}


class Vllm:
    """State of the pretended server; tests change it before they connect, or after."""

    def __init__(self, loopback):
        self.url = loopback.url
        self.calls = loopback.calls
        self.routes = loopback.routes
        self.models = [{"id": "tiny", "max_model_len": 64}]
        self.info = copy.deepcopy(INFO)
        self.versions = ["v1"]
        self.cached_tokens = 0
        self.reads = {
            "seed",
            "cache_salt",
            "prompt_logprobs",
            "return_tokens_as_token_ids",
            "return_token_ids",
        }
        self.reset = True
        self.spoil = lambda answer: None
        self.interval = 1
        self.spoil_stream = lambda chunks: None
        self.routes |= {
            "GET /v1/models": lambda call, handler: (200, {"object": "list", "data": self.models}),
            "POST /v1/completions": self.complete,
            "POST /tokenize": self.tokenize,
            "GET /server_info?config_format=json": lambda call, handler: (200, self.info),
            "GET /weight_info": lambda call, handler: (200, {"weight_version": self.version()}),
            "POST /update_weight_version": lambda call, handler: (200, {"success": True}),
            "POST /collective_rpc": lambda call, handler: (200, {"results": [None]}),
            "POST /reset_prefix_cache": lambda call, handler: (200, {"success": self.reset}),
        }

    def answers(self, status, when=lambda body: True, path="/v1/completions", words="not now"):
        """Calls with such a body get this status, in these words."""
        route = f"POST {path}"
        usual = self.routes[route]
        self.routes[route] = lambda call, handler: (
            handler.send(status, {"error": {"message": words}}, retry_after="0")
            if when(call.body)
            else usual(call, handler)
        )

    def without(self, *paths):
        for name in [name for name in self.routes if name.split(" ")[1].split("?")[0] in paths]:
            del self.routes[name]

    def version(self):
        return self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]

    def complete(self, call, handler):
        body = call.body
        for name, nonsense in (
            ("seed", "?"),
            ("cache_salt", ""),
            ("prompt_logprobs", -7),
            ("return_tokens_as_token_ids", "?"),
        ):
            if name in self.reads and body.get(name) == nonsense:
                return 400, {"error": {"message": f"bad {name}", "type": "BadRequestError", "code": 400}}
        answer = self.answer(body)
        self.spoil(answer)
        return handler.stream(self.events(body, answer)) if body.get("stream") else (200, answer)

    def events(self, body, answer):
        """As vLLM's generator: differences in turn, prompt ids once, then usage if asked for, then [DONE]."""
        about = {"id": answer["id"], "object": answer["object"], "model": "tiny"}
        steps = range(0, body["max_tokens"], self.interval)
        chunks = [
            {**about, "choices": [self.delta(choice, slice(at, at + self.interval))]}
            for at in steps
            for choice in answer["choices"]
        ]
        if body.get("stream_options", {}).get("include_usage"):
            chunks.append({**about, "choices": [], "usage": answer["usage"]})
        chunks.append("[DONE]")
        self.spoil_stream(chunks)
        return [
            b"data: %s\n\n" % (chunk if chunk == "[DONE]" else json.dumps(chunk)).encode() for chunk in chunks
        ]

    def delta(self, choice, place):
        tokens = choice["token_ids"]
        count = len(tokens) if tokens is not None else 1
        delta = {
            "index": choice["index"],
            "text": "…" if place.start == 0 else "",
            "logprobs": choice["logprobs"]
            and {name: values[place] for name, values in choice["logprobs"].items()},
            "finish_reason": choice["finish_reason"] if place.stop >= count else None,
        }
        if tokens is not None:
            delta["token_ids"] = tokens[place]
            delta["prompt_token_ids"] = choice["prompt_token_ids"] if place.start == 0 else None
        return delta

    def answer(self, body):
        choices = [self.choice(body, index) for index in range(body.get("n", 1))]
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": None}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return {"id": "cmpl-1", "object": "text_completion", "choices": choices, "usage": usage}

    def choice(self, body, index):
        """Token i of sample s after a prompt that ends in p is 10·s + p + i, with logprob -(i + 1) / 2."""
        tokens = [10 * index + body["prompt"][-1] + i for i in range(body["max_tokens"])]
        values = [-(i + 1) / 2 for i in range(len(tokens))]
        count = body.get("logprobs")
        shown = None
        if count is not None:
            names = [f"token_id:{token}" for token in tokens]
            tops = [
                {name: value, **{f"token_id:{500 + rank}": -0.1 * (rank + 1) for rank in range(count)}}
                for name, value in zip(names, values, strict=True)
            ]
            shown = {"text_offset": [], "token_logprobs": values, "tokens": names, "top_logprobs": tops}
        prompt = None
        if body.get("prompt_logprobs") is not None:
            prompt = [
                {str(t): {"logprob": -float(t), "rank": 1}, "7": {"logprob": -9.0}} for t in body["prompt"]
            ]
            prompt[0] = None
        keep = "return_token_ids" in self.reads
        return {
            "index": index,
            "text": "…",
            "logprobs": shown,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": tokens if keep else None,
            "prompt_logprobs": prompt,
            "prompt_token_ids": body["prompt"] if keep else None,
        }

    def tokenize(self, call, handler):
        text = call.body.get("prompt") or "".join(m["content"] for m in call.body["messages"])
        return 200, {"count": len(text), "max_model_len": 64, "tokens": list(text.encode())}


@pytest.fixture
def server(loopback):
    return Vllm(loopback)


@pytest.fixture
def connect(server, closing):
    def connect(**options):
        backend = closing(VllmBackend(server.url, **options))
        server.calls.clear()
        return backend

    return connect


# What the server can do

NEVER = (400, 404, 405, 422, 501)
GATEWAY = (302, 401, 403, 404)


def test_a_full_server_has_every_capability(connect):
    backend = connect()

    assert backend.capabilities == frozenset(Capability) == set(HINTS)
    assert (backend.name, backend.model, backend.max_model_len) == ("vllm", "tiny", 64)
    assert backend.generate([]) == backend.score([]) == []


def test_a_plain_server_has_what_it_shows(server, connect):
    server.without(
        "/server_info", "/weight_info", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache"
    )
    server.cached_tokens = None
    server.routes["POST /tokenize"] = lambda call, handler: (400, {"error": "no tokenizer"})

    backend = connect()

    assert backend.capabilities == {
        Capability.TOP_LOGPROBS,
        Capability.SCORE,
        Capability.SEED,
        Capability.CACHE_SALT,
        Capability.STREAM,
    }
    for call, flag in [
        (lambda: backend.tokenize("a"), "--skip-tokenizer-init"),
        (lambda: backend.render_chat([]), "--skip-tokenizer-init"),
        (backend.reset_cache, "VLLM_SERVER_DEV_MODE=1"),
        (lambda: backend.load_weights(None, WeightVersion("x")), "VLLM_SERVER_DEV_MODE=1"),
    ]:
        with pytest.raises(CapabilityMissing, match=flag):
            call()


@pytest.mark.parametrize(
    ("field", "lost", "request_"),
    [
        ("seed", Capability.SEED, {"seed": 1}),
        ("cache_salt", Capability.CACHE_SALT, {"salt": "s"}),
        ("prompt_logprobs", Capability.SCORE, {"prompt_logprobs": 0}),
        ("return_tokens_as_token_ids", Capability.TOP_LOGPROBS, {"logprobs": 1}),
    ],
)
def test_a_field_that_is_ignored_is_no_capability_and_is_not_asked_for(
    server, connect, field, lost, request_
):
    server.reads.remove(field)

    backend = connect()

    assert backend.capabilities == frozenset(Capability) - {lost}
    assert len(one(backend, ask(1)).completions) == 1
    with pytest.raises(CapabilityMissing, match=lost.value):
        backend.generate([ask(1, **request_)])


@pytest.mark.parametrize(
    ("when", "status", "lost"),
    [
        *((lambda body: "prompt_logprobs" in body, status, Capability.SCORE) for status in NEVER),
        *((lambda body: "stream" in body, status, Capability.STREAM) for status in NEVER),
        *((lambda body: "max_tokens" not in body, status, Capability.TOKENIZE) for status in GATEWAY),
        (lambda body: body.get("logprobs"), 400, Capability.TOP_LOGPROBS),
    ],
)
def test_a_refusal_is_a_missing_capability(server, connect, when, status, lost):
    server.answers(status, when, "/tokenize" if lost is Capability.TOKENIZE else "/v1/completions")

    assert connect().capabilities == frozenset(Capability) - {lost}


@pytest.mark.parametrize(
    ("status", "error"), [(429, EngineRefused), (500, EngineError), (503, EngineUnreachable)]
)
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs", "seed", "cache_salt", "stream", "tokenize"])
def test_a_failure_of_the_moment_is_no_missing_capability(server, connect, field, status, error):
    path = "/tokenize" if field == "tokenize" else "/v1/completions"
    server.answers(status, lambda body: field == "tokenize" or field in body, path)

    with pytest.raises(EngineError) as caught:
        connect()
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/v1/models", 401, EngineRefused),
        ("/v1/models", 403, EngineRefused),
        ("/v1/models", 404, EngineRefused),
        ("/weight_info", 429, EngineRefused),
        ("/weight_info", 500, EngineError),
    ],
)
def test_a_route_that_fails_is_not_one_that_is_closed(server, connect, path, status, error):
    server.routes[f"GET {path}"] = lambda call, handler: handler.send(status, {}, retry_after="0")

    with pytest.raises(EngineError) as caught:
        connect()
    assert type(caught.value) is error


def test_nan_that_the_server_cannot_write_is_no_missing_capability(server, connect):
    server.answers(400, lambda body: "logprobs" in body or body.get("prompt_logprobs") == 0, words=NAN_WORDS)

    assert connect().capabilities == frozenset(Capability)


@pytest.mark.parametrize("status", [200, 401, 404, 500])
def test_only_a_route_that_wants_another_method_is_there(server, connect, status):
    server.without("/collective_rpc", "/reset_prefix_cache")
    for path in ("/collective_rpc", "/reset_prefix_cache"):
        server.routes[f"GET {path}"] = lambda call, handler: (status, {"detail": "a gateway"})

    lost = {Capability.LOAD_WEIGHTS, Capability.RESET_CACHE}
    assert connect().capabilities == frozenset(Capability) - lost


@pytest.mark.parametrize("status", [302, 401, 403, 404])
def test_a_gateway_that_lets_only_v1_through_does_not_stop_the_audit(server, connect, status):
    for path in ("/server_info?config_format=json", "/weight_info"):
        server.routes[f"GET {path}"] = lambda call, handler: (status, {"detail": "a gateway"})

    backend = connect()

    assert backend.capabilities == frozenset(Capability) - {
        Capability.EFFECTIVE_CONFIG,
        Capability.WEIGHT_VERSION,
    }
    assert len(one(backend, ask(1)).completions) == 1
    assert backend.fingerprint().semantic == {"model": "tiny"}


def test_without_token_ids_there_is_nothing_to_audit(server, connect):
    server.reads.remove("return_token_ids")

    with pytest.raises(CapabilityMissing):
        connect()


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_a_server_that_reports_logits_is_refused_with_the_flag(server, connect, mode):
    server.info["vllm_config"]["model_config"]["logprobs_mode"] = mode

    with pytest.raises(CapabilityMissing, match="--logprobs-mode processed_logprobs"):
        connect()


def test_the_address_may_end_in_v1(server):
    with contextlib.closing(VllmBackend(f"{server.url}/v1/", api_key="k")) as backend:
        assert backend.model == "tiny"
    assert server.calls[0].headers["authorization"] == "Bearer k"


def test_the_model_is_chosen_by_name(server, connect):
    server.models.append({"id": "adapter", "max_model_len": None})

    backend = connect(model="adapter")
    one(backend, ask(1))

    assert (backend.model, backend.max_model_len) == ("adapter", 64)
    assert {call.body["model"] for call in server.calls if call.path == "/v1/completions"} == {"adapter"}
    with pytest.raises(EngineRefused):
        connect(model="big")


@pytest.mark.parametrize(
    ("wanted", "length"), [("a", 64), ("b", 32), ("of-a", 64), ("of-b", 32), ("of-nobody", 32)]
)
def test_a_model_is_as_long_as_its_own_card_says_or_its_bases(server, connect, wanted, length):
    adapters = [{"id": "of-a", "parent": "a"}, {"id": "of-b", "parent": "b"}, {"id": "of-nobody"}]
    server.models = [{"id": "a", "max_model_len": 64}, {"id": "b", "max_model_len": 32}, *adapters]

    backend = connect(model=wanted)

    assert (backend.model, backend.max_model_len) == (wanted, length)
    with pytest.raises(EngineRefused, match=r"--set engine\.served_model=a"):
        connect()


@pytest.mark.parametrize("models", [[], [{"id": "x"}], [{"name": "x"}]])
def test_a_server_that_does_not_say_how_long_is_no_vllm(server, connect, models):
    server.models = models

    with pytest.raises(BadAnswer):
        connect()


# What is sent


def test_by_default_only_what_trainers_state_is_sent(server, connect):
    one(connect(), ask(1, 2, temperature=0.5, seed=3, salt="s", stop=("x",)))

    [call] = [call for call in server.calls if call.path == "/v1/completions"]
    assert call.body == {
        "model": "tiny",
        "prompt": [1, 2],
        "temperature": 0.5,
        "max_tokens": 2,
        "seed": 3,
        "n": 1,
        "logprobs": 0,
        "stop": ["x"],
        "cache_salt": "s",
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def test_explicit_leaves_nothing_to_the_server(server, connect):
    one(connect(explicit=True), ask(1, logit_bias={4: 1.5}))

    [call] = [call for call in server.calls if call.path == "/v1/completions"]
    assert call.body == {
        "model": "tiny",
        "prompt": [1],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {"4": 1.5},
        "n": 1,
        "max_tokens": 2,
        "min_tokens": 0,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def test_a_request_that_would_be_cut_is_not_sent(server, connect):
    backend = connect()

    with pytest.raises(InvalidPrompt):
        backend.generate([ask(1), ask(*range(63))])
    with pytest.raises(InvalidPrompt):
        backend.score([range(64)])
    assert server.calls == []
    assert len(backend.score([range(63)])[0]) == 62


# What comes back


def test_a_completion_carries_all_that_the_server_said(server, connect):
    server.cached_tokens = 16
    backend = connect()
    server.spoil = lambda answer: answer["choices"].reverse()  # they are bound by index, not by order

    answer = one(backend, ask(20, 30, n=2, seed=1, logprobs=2, prompt_logprobs=0))

    assert answer.problems == ()
    first, second = answer.completions
    assert first.token_ids == (30, 31)
    assert second.token_ids == (40, 41)
    assert first.logprobs == (-0.5, -1.0)
    assert first.prompt_token_ids == (20, 30)
    assert first.prompt_logprobs == (None, -30.0)
    assert (first.sample_index, second.sample_index) == (0, 1)
    assert first.finish_reason is FinishReason.LENGTH
    assert first.kind is LogprobKind.PROCESSED
    assert first.versions == (VersionSpan(WeightVersion("v1"), 0, 2),)
    assert first.cached_tokens == 16
    assert first.fingerprint == backend.fingerprint().digest
    assert first.top_logprobs == ((TokenAlternative(500, -0.1), TokenAlternative(501, -0.2)),) * 2
    assert first.sampling.seed == 1


def test_requests_are_in_flight_together(server, connect):
    backend = connect(concurrency=6)
    complete, meeting = server.complete, threading.Barrier(6)

    def meet(call, handler):
        meeting.wait(5)  # a request alone would break the barrier
        return complete(call, handler)

    server.routes["POST /v1/completions"] = meet

    assert len(backend.generate([ask(i) for i in range(6)])) == 6


def change(**changes):
    def spoil(answer):
        choice = answer["choices"][1]
        for path, value in changes.items():
            *parents, last = path.split("__")
            target = choice
            for parent in parents:
                target = target[parent]
            target[last] = value

    return spoil


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (change(logprobs=None), "value/completion"),
        (change(logprobs__token_logprobs=[-1.0]), "value/completion"),
        (change(logprobs__token_logprobs=[-1.0, None]), "value/non-finite"),
        (change(logprobs__token_logprobs=[float("nan"), -1.0]), "value/non-finite"),
        (change(logprobs__token_logprobs=[-1.0, float("-inf")]), "value/non-finite"),
        (change(logprobs__token_logprobs=[-9999.0, -1.0]), "value/non-finite"),
        (change(logprobs__token_logprobs=[0.5, -1.0]), "value/completion"),
        (change(logprobs__token_logprobs="all of them"), "engine/bad-answer"),
        (change(logprobs__tokens=["token_id:11", "token_id:99"]), "value/completion"),
        (change(logprobs__tokens=["token_id:12", "token_id:11"]), "value/completion"),
        (change(logprobs__tokens=["token_id:x", "token_id:1"]), "engine/bad-answer"),
        (change(logprobs__top_logprobs=[]), "value/completion"),
        (change(logprobs__top_logprobs=[{"token_id:1": -1.0}]), "value/completion"),
        (change(logprobs__top_logprobs=[None, None]), "value/completion"),
        (change(logprobs__top_logprobs=[{"a": -1.0}] * 2), "engine/bad-answer"),
        (change(logprobs__top_logprobs=[{"token_id:1": None}] * 2), "value/non-finite"),
        (change(logprobs__top_logprobs=[{"token_id:1": float("nan")}] * 2), "value/non-finite"),
        (
            change(logprobs__top_logprobs=[{f"token_id:{i}": -1.0 for i in range(500, 504)}] * 2),
            "value/completion",
        ),
        (change(token_ids=None), "value/completion"),
        (change(prompt_token_ids=None), "value/completion"),
        (change(token_ids=[11, -1]), "value/completion"),
        (change(token_ids=["11", "12"]), "engine/bad-answer"),
        (change(prompt_token_ids=[]), "value/completion"),
        (change(prompt_logprobs=None), "value/completion"),
        (change(prompt_logprobs=[None]), "value/completion"),
        (change(prompt_logprobs=[None, None]), "value/completion"),
        (change(prompt_logprobs=[None, {"5": {"logprob": -1.0}}]), "value/completion"),
        (change(prompt_logprobs=[None, {"1": {"logprob": None}}]), "value/non-finite"),
        (change(prompt_logprobs=[None, {"1": {"logprob": -9999.0}}]), "value/non-finite"),
        (change(finish_reason="repetition"), "engine/bad-answer"),
        (change(finish_reason=None), "engine/bad-answer"),
    ],
)
def test_a_sample_that_cannot_be_believed_is_a_problem_and_its_neighbours_are_not(
    server, connect, spoil, code
):
    backend = connect()
    server.spoil = spoil

    answer = one(backend, ask(20, 1, n=3, logprobs=2, prompt_logprobs=0))

    [problem] = answer.problems
    assert problem.code == code
    assert problem.message.startswith("sample 1: ")
    assert [completion.sample_index for completion in answer.completions] == [0, 2]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: answer["choices"].pop(),
        lambda answer: answer["choices"].append(answer["choices"][0]),
        lambda answer: answer["choices"][1].update(index=0),
        lambda answer: answer["choices"][1].update(index=[]),
        lambda answer: answer["choices"][1].pop("index"),
        lambda answer: answer.update(choices=None),
        lambda answer: answer.update(choices=["a", "b"]),
        lambda answer: answer.clear(),
    ],
)
def test_an_answer_that_cannot_be_told_apart_raises(server, connect, spoil):
    backend = connect()
    server.spoil = spoil

    with pytest.raises(BadAnswer):
        backend.generate([ask(1, n=2)])


def test_tokens_named_by_text_are_not_compared(server, connect):
    backend = connect()
    server.spoil = lambda answer: answer["choices"][0]["logprobs"].update(tokens=["a", "b"])

    assert len(one(backend, ask(1)).completions) == 1


def test_a_stop_at_once_is_an_empty_completion(server, connect):
    backend = connect()
    empty = {"token_logprobs": [], "tokens": [], "top_logprobs": []}
    server.spoil = lambda answer: answer["choices"][0].update(
        token_ids=[], logprobs=empty, finish_reason="abort"
    )

    [completion] = one(backend, ask(1)).completions

    assert (completion.token_ids, completion.versions) == ((), ())
    assert completion.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        # The sampled token 1 is one of the two likeliest, and comes first on the wire.
        ({"1": -0.9, "8": -0.6}, ((8, -0.6), (1, -0.9))),
        # It is not, and comes on top.
        ({"1": -3.0, "8": -0.6, "9": -0.9}, ((8, -0.6), (9, -0.9))),
        # Ties go by id.
        ({"9": -0.7, "8": -0.7}, ((8, -0.7), (9, -0.7))),
        # Truncation excluded the rest.
        ({"1": -0.0, "8": -9999.0}, ((1, -0.0),)),
    ],
)
def test_alternatives_are_the_likeliest_in_order(server, connect, entry, expected):
    backend = connect()
    named = {f"token_id:{token}": value for token, value in entry.items()}
    server.spoil = lambda answer: answer["choices"][0]["logprobs"].update(top_logprobs=[named])

    [completion] = one(backend, ask(1, max_tokens=1, logprobs=2)).completions

    assert completion.top_logprobs == (tuple(TokenAlternative(*pair) for pair in expected),)


def test_nan_that_the_server_cannot_write_is_a_problem_of_every_sample(server, connect):
    backend = connect()
    server.answers(400, lambda body: body["prompt"] == [1], words=NAN_WORDS)

    sick, well = backend.generate([ask(1, n=2), ask(2)])

    assert [problem.code for problem in sick.problems] == [NonFinite.code] * 2
    assert sick.completions == ()
    assert len(well.completions) == 1
    with pytest.raises(NonFinite):
        backend.score([(1,)])


def test_the_version_is_unknown_where_it_moved_or_is_not_shown(server, connect):
    backend = connect()
    server.versions = ["v1", "v2"]
    [moved] = one(backend, ask(1)).completions
    [still] = one(backend, ask(1)).completions
    server.versions = [""]
    [nameless] = one(backend, ask(1)).completions
    server.without("/weight_info")
    [silent] = one(connect(), ask(1)).completions

    labels = [completion.versions[0].version.label for completion in (moved, still, nameless, silent)]
    assert labels == ["unknown", "v2", "unknown", "unknown"]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("raw_logprobs", LogprobKind.RAW),
        ("processed_logprobs", LogprobKind.PROCESSED),
        (None, LogprobKind.PROCESSED),
    ],
)
def test_the_kind_is_what_the_server_claims(server, connect, mode, kind):
    server.info["vllm_config"]["model_config"]["logprobs_mode"] = mode

    [completion] = one(connect(), ask(1)).completions

    assert completion.kind is kind


# Scoring, tokens, weights, caches


def test_scores_are_those_of_the_tokens_after_the_first(server, connect):
    backend = connect()

    assert backend.score([(3, 4, 5), (6,), (1, 2)]) == [[-4.0, -5.0], [], [-2.0]]
    assert [call.body["prompt_logprobs"] for call in server.calls] == [0, 0, 0]
    with pytest.raises(InvalidPrompt):
        backend.score([()])


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda choice: choice.update(prompt_token_ids=[3, 4, 6]), BadAnswer),
        (lambda choice: choice.update(prompt_token_ids=None), BadAnswer),
        (lambda choice: choice.update(prompt_token_ids=[3] * 60), BadAnswer),
        (lambda choice: choice.update(prompt_logprobs=None), ZerodriftError),
        (lambda choice: choice["prompt_logprobs"].pop(), ZerodriftError),
        (lambda choice: choice["prompt_logprobs"][1].clear(), ZerodriftError),
        (lambda choice: choice["prompt_logprobs"][1]["4"].update(logprob=-9999.0), NonFinite),
        (lambda choice: choice["prompt_logprobs"][1]["4"].update(logprob=float("nan")), NonFinite),
        (lambda choice: choice.clear(), BadAnswer),
    ],
)
def test_scores_that_cannot_be_believed_raise(server, connect, spoil, error):
    backend = connect()
    server.spoil = lambda answer: spoil(answer["choices"][0])

    with pytest.raises(error):
        backend.score([(3, 4, 5)])


def test_the_server_tokenizes(server, connect):
    backend = connect()

    assert backend.tokenize("ab") == (97, 98)
    assert backend.render_chat([{"role": "user", "content": "c"}]) == (99,)
    assert [call.body for call in server.calls] == [
        {"model": "tiny", "prompt": "ab"},
        {"model": "tiny", "messages": [{"role": "user", "content": "c"}], "add_generation_prompt": True},
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.materialise("testbed:llama", tmp_path_factory.mktemp("weights") / "step-3")


def test_weights_are_loaded_from_a_directory_and_then_labelled(server, connect, checkpoint):
    connect().load_weights(checkpoint / "." / "x" / "..", WeightVersion("step-3"))

    posts = [(call.path, call.body) for call in server.calls if call.method == "POST"]
    assert posts == [
        (
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint.resolve())}},
        ),
        ("/update_weight_version", {"new_version": "step-3"}),
    ]


def test_a_server_without_labels_is_not_asked_for_one(server, connect, checkpoint):
    server.without("/update_weight_version")
    server.routes["POST /collective_rpc"] = lambda call, handler: (200, b"")

    connect().load_weights(checkpoint, WeightVersion("step-3"))

    assert [call.path for call in server.calls if call.method == "POST"] == ["/collective_rpc"]


def test_weights_that_would_kill_the_engine_are_not_sent(server, connect, checkpoint, tmp_path):
    backend = connect()

    with pytest.raises(ModelNotFound):
        backend.load_weights(tmp_path / "nowhere", WeightVersion("x"))
    with pytest.raises(UnsupportedModel):
        backend.load_weights(tmp_path, WeightVersion("x"))
    torn = tmp_path / "torn"
    shutil.copytree(checkpoint, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(TruncatedWeights):
        backend.load_weights(torn, WeightVersion("x"))
    assert server.calls == []


def test_tensors_that_do_not_fit_what_is_served_are_not_sent(server, connect, checkpoint, tmp_path):
    """vLLM 0.28 and 0.32 answer such an update with an error, and every request after it with a dead engine."""
    server.models = [{"id": "tiny", "max_model_len": 64, "root": str(checkpoint)}]
    backend = connect()
    narrow = models.materialise("testbed:llama", tmp_path / "narrow")
    tensors = load_file(narrow / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:16].clone()
    save_file(tensors, narrow / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        backend.load_weights(narrow, WeightVersion("x"))
    assert server.calls == []
    backend.load_weights(checkpoint, WeightVersion("x"))
    assert "/collective_rpc" in [call.path for call in server.calls]


def test_a_failed_load_does_not_move_the_label(server, connect, checkpoint):
    server.routes["POST /collective_rpc"] = lambda call, handler: (500, {"error": {"message": "dead"}})

    with pytest.raises(EngineError, match="dead"):
        connect().load_weights(checkpoint, WeightVersion("x"))
    assert "/update_weight_version" not in [call.path for call in server.calls]


def test_a_reset_that_did_not_happen_raises(server, connect):
    backend = connect()
    backend.reset_cache()
    server.reset = False

    with pytest.raises(EngineError, match="success=false"):
        backend.reset_cache()


# The fingerprint


def test_facts_fall_into_three_parts(connect):
    facts = connect().fingerprint()

    assert facts.semantic == {
        "model": "tiny",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "auto",
        "hf_overrides": "{}",
    }
    assert facts.numeric == {
        "dtype": "float32",
        "head_dtype": "model",
        "quantization": "null",
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": "true",
        "tensor_parallel_size": "1",
        "VLLM_CPU_ATTN_SPLIT_KV": "true",
        "torch": "2.13.0+cpu",
        "cpu": "Fast CPU",
        "threads": "2",
    }
    assert facts.deployment == {"max_model_len": "64", "max_num_seqs": "128", "route": "/v1/completions"}


@pytest.mark.parametrize(
    ("path", "value", "moved"),
    [
        (("vllm_config", "model_config", "hf_overrides"), {"head_dtype": "float32"}, "numeric"),
        (("vllm_config", "model_config", "hf_overrides"), {"rope_theta": 1}, "semantic"),
        (("vllm_config", "model_config", "logprobs_mode"), "raw_logprobs", "semantic"),
        (("vllm_config", "model_config", "generation_config"), "vllm", "semantic"),
        (("vllm_config", "model_config", "dtype"), "torch.bfloat16", "numeric"),
        (("vllm_env", "VLLM_CPU_ATTN_SPLIT_KV"), False, "numeric"),
        (("system_env", "env_vars"), "OMP_NUM_THREADS=1", "numeric"),
        (("vllm_config", "scheduler_config", "max_num_seqs"), 1, "deployment"),
        (("vllm_env", "VLLM_CACHE_ROOT"), "/elsewhere", None),
    ],
)
def test_a_setting_moves_its_own_digest_alone(server, connect, path, value, moved):
    before = connect().fingerprint().digests()
    target = server.info
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    after = connect().fingerprint().digests()

    assert [part for part in before if before[part] != after[part]] == ([moved] if moved else [])


@pytest.mark.parametrize("info", ["a text", {"vllm_config": "VllmConfig(...)"}, None])
def test_settings_that_cannot_be_read_are_no_settings(server, connect, info):
    server.info = info

    backend = connect()

    assert Capability.EFFECTIVE_CONFIG not in backend.capabilities
    assert backend.fingerprint().semantic == {"model": "tiny"}
    assert backend.fingerprint().numeric == {}


def test_settings_of_another_shape_are_left_out(server, connect):
    server.info = {"vllm_config": {"model_config": {"hf_overrides": "<function>"}, "cache_config": None}}

    facts = connect().fingerprint()

    assert facts.semantic == {"model": "tiny", "hf_overrides": "{}"}
    assert facts.numeric == {"head_dtype": "model"}
    assert json.dumps(facts.digests())


# A server that does not stay the same


def test_a_server_started_anew_with_other_settings_shows_them(server, connect):
    backend = connect()
    before = backend.fingerprint()
    assert backend.fingerprint() == before

    server.info["vllm_config"]["model_config"]["dtype"] = "torch.bfloat16"

    assert backend.fingerprint().numeric["dtype"] == "bfloat16"
    assert backend.fingerprint().digest != before.digest


@pytest.mark.parametrize("after", ["two", "one"])
def test_a_server_started_anew_with_the_same_settings_is_known_by_its_number(server, connect, after):
    server.info["vllm_config"]["instance_id"] = "one"
    backend = connect()
    before = backend.fingerprint()

    server.info["vllm_config"]["instance_id"] = after

    assert (backend.fingerprint().digest == before.digest) is (after == "one")
    assert connect().fingerprint() == before, "the number itself is no fact: it is another in every run"


# Streams


@pytest.mark.parametrize("interval", [1, 2, 3, 8])
def test_what_is_streamed_is_what_comes_whole(server, connect, interval):
    server.interval = interval
    backend = connect()
    requests = [ask(1, 2, n=3, max_tokens=4, logprobs=2, seed=1), ask(7, max_tokens=4)]

    whole, streamed = backend.generate(requests), backend.stream(requests)

    assert [answer.completions for answer in streamed] == [answer.completions for answer in whole]
    assert [answer.stream_deltas for answer in streamed] == [3 * -(-4 // interval), -(-4 // interval)]
    assert [answer.stream_deltas for answer in whole] == [0, 0]
    body = server.calls[-2].body
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


def lose_logprobs(chunks):
    chunks[1]["choices"][0]["logprobs"] = None


def lose_all_logprobs(chunks):
    for chunk in chunks[:-2]:
        del chunk["choices"][0]["logprobs"]


def shift_logprobs(chunks):
    values = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-2]]
    for chunk, logprobs in zip(chunks, values[:1] + values[:-1], strict=False):
        chunk["choices"][0]["logprobs"] = logprobs


@pytest.mark.parametrize("spoil", [lose_logprobs, lose_all_logprobs, shift_logprobs])
def test_logprobs_that_are_lost_in_the_stream_are_a_problem_of_the_sample(server, connect, spoil):
    backend = connect()
    server.spoil_stream = spoil

    [answer] = backend.stream([ask(1, max_tokens=4)])

    assert answer.completions == ()
    assert [problem.code for problem in answer.problems] == ["value/completion"]
    assert one(backend, ask(1, max_tokens=4)).problems == ()


def test_a_lost_or_repeated_piece_is_not_mended(server, connect):
    backend = connect()
    server.spoil_stream = lambda chunks: chunks.pop(1)
    [answer] = backend.stream([ask(1, max_tokens=4)])
    assert answer.completions[0].token_ids == (1, 3, 4)
    server.spoil_stream = lambda chunks: chunks.insert(1, chunks[1])
    [answer] = backend.stream([ask(1, max_tokens=4)])
    assert answer.completions[0].token_ids == (1, 2, 2, 3, 4)


def died(chunks):
    chunks[1:] = [{"error": {"message": "EngineCore died", "code": 500}}, "[DONE]"]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda chunks: chunks.pop(), EngineUnreachable),
        (lambda chunks: chunks[-3]["choices"][0].update(finish_reason=None), BadAnswer),
        (lambda chunks: chunks.insert(-2, chunks[-3]), BadAnswer),
        (lambda chunks: chunks[0]["choices"][0].update(index=4, finish_reason="stop"), BadAnswer),
        (died, EngineError),
    ],
    ids=["no end", "no reason", "after the end", "unasked", "an error inside"],
)
def test_a_stream_that_cannot_be_put_together(server, connect, spoil, error):
    """What is wrong with a stream is for a probe to say, and not to be hidden by a missing capability."""
    server.spoil_stream = spoil if error is EngineUnreachable else server.spoil_stream
    backend = connect()
    assert Capability.STREAM in backend.capabilities
    server.spoil_stream = spoil

    with pytest.raises(EngineError) as caught:
        backend.stream([ask(1, max_tokens=4)])
    assert type(caught.value) is error


def without_ids(chunks):
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            choice.pop("token_ids", None)


@pytest.mark.parametrize("how", ["no stream", "no ids"])
def test_a_server_that_does_not_stream_ids_says_so(server, connect, how):
    usual = server.complete
    if how == "no ids":
        server.spoil_stream = without_ids
    else:
        server.routes["POST /v1/completions"] = lambda call, handler: (
            (200, server.answer(call.body)) if call.body.get("stream") else usual(call, handler)
        )
    backend = connect()

    assert backend.capabilities == frozenset(Capability) - {Capability.STREAM}
    with pytest.raises(CapabilityMissing):
        backend.stream([ask(1)])

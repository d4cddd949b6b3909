"""VllmBackend by the route for ids in and ids out: against a small server that speaks its format."""

import json
import sys

import pytest
from asking import ask, one

from zerodrift.backends.base import Capability
from zerodrift.backends.registry import ServedModel, open_engine
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_launch import route_flags
from zerodrift.config.engine import EngineConfig
from zerodrift.core.completion import FinishReason, TokenAlternative
from zerodrift.core.errors import (
    BadAnswer,
    ConfigError,
    EngineRefused,
    InvalidCompletion,
    InvalidValue,
    NonFinite,
)
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion

PATH = "/inference/v1/generate"


class Vllm:
    """State of the pretended server; tests change it before they connect, or after."""

    def __init__(self, loopback):
        self.url, self.calls, self.routes = loopback.url, loopback.calls, loopback.routes
        self.spoil = lambda answer: None
        self.named = False
        self.routes |= {
            "GET /v1/models": lambda call, handler: (200, {"data": [{"id": "tiny", "max_model_len": 64}]}),
            f"POST {PATH}": self.generate,
            "POST /tokenize": lambda call, handler: (200, {"tokens": [1]}),
            "GET /weight_info": lambda call, handler: (200, {"weight_version": "now"}),
        }

    def generate(self, call, handler):
        body, sampling = call.body, call.body["sampling_params"]
        if "?" in sampling.values() or body.get("cache_salt") == "" or sampling.get("prompt_logprobs") == -7:
            return 400, {"error": {"message": "bad value", "code": 400}}
        answer = self.answer(body)
        self.spoil(answer)
        return handler.stream(self.events(answer)) if body.get("stream") else (200, answer)

    def answer(self, body):
        sampling, prompt = body["sampling_params"], body["token_ids"]
        scores = None
        if sampling.get("prompt_logprobs") is not None:
            scores = [None, *({str(t): {"logprob": -float(t), "rank": 1}} for t in prompt[1:])]
        return {
            "request_id": "generate-tokens-1",
            "choices": [self.choice(body, index) for index in range(sampling.get("n", 1))],
            "usage": {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 3}},
            "prompt_logprobs": scores,
            "prompt_token_ids": prompt if body.get("return_token_ids") else None,
        }

    def choice(self, body, index):
        """Token i of sample s after a prompt that ends in p is 10·s + p + i, with logprob -(i + 1) / 2."""
        sampling = body["sampling_params"]
        tokens = [10 * index + body["token_ids"][-1] + i for i in range(sampling["max_tokens"])]
        count = sampling.get("logprobs")
        content = [self.entry(token, -(i + 1) / 2, count or 0) for i, token in enumerate(tokens)]
        return {
            "index": index,
            "finish_reason": "length",
            "token_ids": tokens,
            "weight_versions": [{"version": "v1", "start": 0, "end": len(tokens)}],
            "logprobs": None if count is None else {"content": content},
        }

    def entry(self, token, logprob, count):
        """As vLLM's: the sampled token is the first, and the list is cut behind `count`, or 1."""
        listed = [(token, logprob), *((500 + rank, -0.1 * (rank + 1)) for rank in range(count))]
        top = [self.shown(*each) for each in listed[: max(count, 1)]]
        return self.shown(token, logprob) | {"top_logprobs": top}

    def shown(self, token, logprob):
        name = {"token": f"token_id:{token}"} if self.named else {"token_id": token}
        return name | {"logprob": logprob}

    def events(self, answer):
        """Differences of one token; prompt ids with the first, versions with the last, then usage."""
        events = []
        for choice in answer["choices"]:
            tokens = choice["token_ids"]
            for at in range(len(tokens)):
                last = at == len(tokens) - 1
                piece = {
                    "index": choice["index"],
                    "token_ids": tokens[at : at + 1],
                    "logprobs": choice["logprobs"]
                    and {"content": choice["logprobs"]["content"][at : at + 1]},
                    "finish_reason": choice["finish_reason"] if last else None,
                    "weight_versions": choice.get("weight_versions") if last else None,
                }
                first = {} if events else {"prompt_token_ids": answer["prompt_token_ids"]}
                events.append({"choices": [piece], "usage": None, **first})
        events.append({"choices": [], "usage": answer["usage"]})
        return [*(b"data: %s\n\n" % json.dumps(event).encode() for event in events), b"data: [DONE]\n\n"]


@pytest.fixture
def server(loopback):
    return Vllm(loopback)


@pytest.fixture
def connect(server, closing):
    def connect(**options):
        backend = closing(VllmBackend(server.url, route="generate", **options))
        server.calls.clear()
        return backend

    return connect


# What is asked


def test_only_this_route_is_asked(server, connect):
    backend = connect()

    assert backend.capabilities == {
        Capability.TOP_LOGPROBS,
        Capability.SCORE,
        Capability.SEED,
        Capability.CACHE_SALT,
        Capability.CACHED_TOKENS,
        Capability.TOKENIZE,
        Capability.WEIGHT_VERSION,
        Capability.STREAM,
    }
    backend.generate([ask(1)])
    backend.stream([ask(1)])
    backend.score([(1, 2)])
    assert {call.path for call in server.calls} == {PATH, "/weight_info"}


def test_the_route_is_a_fact_of_the_run(connect):
    """Two runs by two routes are not the same run, and `audit diff` says why."""
    assert connect().fingerprint().deployment["route"] == PATH


def test_a_body_holds_vllms_own_sampling_parameters(server, connect):
    connect().generate([ask(4, 5, salt="s", seed=7, n=2, logprobs=3, top_p=0.5)])

    [body] = [call.body for call in server.calls if call.path == PATH]
    assert body == {
        "model": "tiny",
        "token_ids": [4, 5],
        "return_token_ids": True,
        "cache_salt": "s",
        # One more than was asked for: the list is cut one short.
        "sampling_params": {
            "temperature": 1.0,
            "max_tokens": 2,
            "seed": 7,
            "n": 2,
            "logprobs": 4,
            "top_p": 0.5,
        },
    }


def test_every_parameter_is_sent_where_that_is_wanted(server, connect):
    connect(explicit=True).generate([ask(4)])

    [body] = [call.body for call in server.calls if call.path == PATH]
    expected = {*SamplingParams.__struct_fields__} - {"seed", "prompt_logprobs"}
    assert set(body["sampling_params"]) == expected
    assert body["sampling_params"]["logprobs"] == 0


@pytest.mark.parametrize("status", [403, 404])
def test_a_route_that_is_closed_names_the_flag(server, connect, status):
    server.routes[f"POST {PATH}"] = lambda call, handler: (status, {"error": {"message": "disabled"}})

    with pytest.raises(EngineRefused, match=f"answered {status}.*--enable-scale-out"):
        connect()


# What is answered


def test_an_answer_becomes_completions(connect):
    answer = one(connect(), ask(4, 5, n=2, logprobs=2))

    assert answer.problems == ()
    assert [each.token_ids for each in answer.completions] == [(5, 6), (15, 16)]
    first = answer.completions[0]
    assert first.prompt_token_ids == (4, 5)
    assert first.logprobs == (-0.5, -1.0)
    assert first.finish_reason is FinishReason.LENGTH
    assert first.cached_tokens == 3
    assert first.versions == (VersionSpan(WeightVersion("v1"), 0, 2),)
    # The sampled token was the first of the three that came, and is not among the two likeliest.
    assert first.top_logprobs[0] == (TokenAlternative(500, -0.1), TokenAlternative(501, -0.2))


def test_a_stream_is_what_comes_whole(connect):
    backend = connect()
    [whole], [streamed] = (
        call([ask(4, 5, n=2, logprobs=2, max_tokens=3)]) for call in (backend.generate, backend.stream)
    )

    assert (streamed.completions, streamed.problems) == (whole.completions, ())
    assert streamed.stream_deltas == 6


def test_scores_are_those_of_the_prompt(connect):
    backend = connect()

    assert backend.score([(4, 5, 6)]) == [[-5.0, -6.0]]
    assert one(backend, ask(4, 5, prompt_logprobs=0)).completions[0].prompt_logprobs == (None, -5.0)


def test_an_older_release_names_tokens_and_does_not_repeat_the_prompt(server, connect):
    server.named = True

    def older(answer):
        answer["prompt_token_ids"] = None
        for choice in answer["choices"]:
            del choice["weight_versions"]

    server.spoil = older
    backend = connect()
    answer = one(backend, ask(4, 5, logprobs=1))

    [completion] = answer.completions
    assert (completion.prompt_token_ids, completion.token_ids) == ((4, 5), (5, 6))
    assert completion.top_logprobs[0] == (TokenAlternative(500, -0.1),)
    # What /weight_info says, before and after.
    assert completion.versions == (VersionSpan(WeightVersion("now"), 0, 2),)
    assert backend.score([(4, 5)]) == [[-5.0]]


def test_versions_are_spans_and_one_without_tokens_is_none(server, connect):
    spans = [("a", 0, 1), ("b", 1, 1), ("", 1, 2)]

    def spoil(answer):
        names = ("version", "start", "end")
        answer["choices"][0]["weight_versions"] = [dict(zip(names, span, strict=True)) for span in spans]

    server.spoil = spoil
    [completion] = one(connect(), ask(4)).completions

    assert [(each.version.label, each.start, each.end) for each in completion.versions] == [
        ("a", 0, 1),
        ("unknown", 1, 2),
    ]


BAD, UNBELIEVABLE = BadAnswer.code, InvalidCompletion.code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"token_ids": None}, UNBELIEVABLE),
        ({"token_ids": [4, 9]}, UNBELIEVABLE),
        ({"token_ids": ["4", "5"]}, BAD),
        ({"logprobs": None}, UNBELIEVABLE),
        ({"logprobs": {"content": None}}, BAD),
        ({"logprobs": {"content": []}}, UNBELIEVABLE),
        ({"finish_reason": "bored"}, BAD),
        ({"finish_reason": None}, BAD),
        ({"weight_versions": "v1"}, BAD),
        ({"weight_versions": [{"version": "v1", "start": 0, "end": 1}]}, UNBELIEVABLE),
        ({"weight_versions": [{"version": "v1", "start": 2, "end": 0}]}, InvalidValue.code),
        ({"weight_versions": []}, UNBELIEVABLE),
    ],
)
def test_a_sample_that_cannot_be_believed_is_a_problem_by_itself(server, connect, change, code):
    backend = connect()
    server.spoil = lambda answer: answer["choices"][0].update(change)
    answer = one(backend, ask(4, n=2))

    assert [each.sample_index for each in answer.completions] == [1]
    assert [problem.code for problem in answer.problems] == [code]


@pytest.mark.parametrize("value", [None, -9999.0, float("nan")])
def test_a_number_that_is_none_is_named(server, connect, value):
    backend = connect()
    server.spoil = lambda answer: answer["choices"][0]["logprobs"]["content"][1].update(logprob=value)
    answer = one(backend, ask(4))

    assert answer.completions == ()
    assert [problem.code for problem in answer.problems] == [NonFinite.code]


def test_alternatives_that_truncation_excluded_are_left_out(server, connect):
    backend = connect()
    server.spoil = lambda answer: [
        entry["top_logprobs"][-1].update(logprob=-9999.0)
        for entry in answer["choices"][0]["logprobs"]["content"]
    ]
    [completion] = one(backend, ask(4, logprobs=2)).completions

    assert completion.top_logprobs[0] == (TokenAlternative(500, -0.1), TokenAlternative(4, -0.5))


@pytest.mark.parametrize("listed", [[], [{"token_id": t, "logprob": -1.0} for t in range(9)]])
def test_alternatives_of_another_number_are_refused(server, connect, listed):
    backend = connect()
    server.spoil = lambda answer: answer["choices"][0]["logprobs"]["content"][0].update(top_logprobs=listed)

    assert [problem.code for problem in one(backend, ask(4, logprobs=2)).problems] == [UNBELIEVABLE]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": None, "usage": {"prompt_tokens": 7}},
        {"prompt_token_ids": None, "usage": None},
        {"prompt_token_ids": "4"},
    ],
)
def test_a_prompt_that_nobody_confirms_is_a_problem(server, connect, change):
    backend = connect()
    server.spoil = lambda answer: answer.update(change)

    assert len(one(backend, ask(4)).problems) == 1
    with pytest.raises(BadAnswer):
        backend.score([(4, 5)])


@pytest.mark.parametrize("change", [{"choices": None}, {"choices": []}, {"choices": [{"index": "0"}]}])
def test_an_answer_that_is_none(server, connect, change):
    backend = connect()
    server.spoil = lambda answer: answer.update(change)

    with pytest.raises(BadAnswer, match=PATH):
        backend.generate([ask(4)])


# From a configuration


@pytest.mark.parametrize("name", ["reference", "exact", "llama-cpp", "sglang"])
def test_no_other_engine_has_this_route(name, tmp_path):
    url = None if name in ("reference", "exact") else "http://127.0.0.1:9"
    config = EngineConfig(name=name, route="generate", url=url)
    with pytest.raises(ConfigError, match=f"engine.route is 'generate', and {name} is asked by one route"):
        open_engine(config, ServedModel("testbed:llama", "auto"), tmp_path)


def test_the_route_is_taken_from_the_configuration(server, tmp_path):
    config = EngineConfig(name="vllm", route="generate", url=server.url)
    with open_engine(config, ServedModel("testbed:llama", "auto"), tmp_path):
        assert PATH in {call.path for call in server.calls}
        assert "/v1/completions" not in {call.path for call in server.calls}


@pytest.mark.parametrize(("source", "flags"), [("enable_scale_out: bool", ["--enable-scale-out"]), ("", [])])
def test_the_flag_is_given_to_a_release_that_knows_it(tmp_path, source, flags):
    arguments = tmp_path / "vllm" / "entrypoints" / "somewhere" / "cli_args.py"
    arguments.parent.mkdir(parents=True)
    arguments.write_text(source)
    (tmp_path / "vllm" / "__init__.py").touch()
    env = {"PYTHONPATH": str(tmp_path)}
    config = EngineConfig(name="vllm", route="generate", python=sys.executable, env=env)

    assert route_flags(config) == flags
    assert route_flags(EngineConfig(name="vllm", python=sys.executable, env=env)) == []

"""What HTTP carries is what the engine made: ids, every bit of every logprob, and which weights made it."""

import pytest

from zerodrift.core.request import SamplingParams

PROMPT = [5, 17, 300, 42]
ASK = {"prompt": PROMPT, "max_tokens": 6, "seed": 7, "logprobs": 2, "return_token_ids": True}
IDS = {**ASK, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def made(engine):
    return engine.generate([PROMPT], SamplingParams(max_tokens=6, seed=7, logprobs=2, n=2))


def test_a_completion_has_the_engines_bits(served, made):
    [first, second] = served.post("/v1/completions", {**IDS, "n": 2}).json["choices"]
    for choice, output in zip((first, second), made, strict=True):
        assert choice["token_ids"] == list(output.token_ids)
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["logprobs"]["token_logprobs"] == list(output.logprobs)
        assert choice["text"] == output.text
        assert choice["seed"] == 7
        [span] = choice["weight_versions"]
        assert (span["version"], span["start"], span["end"]) == ("initial", 0, 6)
        assert span["digest"] == output.versions[0].version.digest
        for entry, tops, token in zip(
            choice["logprobs"]["top_logprobs"], output.top_logprobs, output.token_ids, strict=True
        ):
            assert {f"token_id:{each.token_id}": each.logprob for each in tops}.items() <= entry.items()
            assert f"token_id:{token}" in entry
    assert first["token_ids"] != second["token_ids"]


def test_all_routes_sample_alike(served, made):
    sampling = {"max_tokens": 6, "seed": 7, "logprobs": 2}
    generated = served.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}).json
    [choice] = generated["choices"]
    entries = choice["logprobs"]["content"]
    assert choice["token_ids"] == [entry["token_id"] for entry in entries] == list(made[0].token_ids)
    assert [entry["logprob"] for entry in entries] == list(made[0].logprobs)
    assert all(entry["token"] == f"token_id:{entry['token_id']}" for entry in entries)
    assert generated["prompt_token_ids"] == PROMPT
    assert choice["weight_versions"][0]["version"] == "initial"


@pytest.mark.parametrize("wanted", [None, 0, 2])
def test_a_stream_joined_is_the_whole(served, wanted):
    ask = {**IDS, "n": 2, "logprobs": wanted}
    whole = served.post("/v1/completions", ask).json
    events = served.post(
        "/v1/completions", {**ask, "stream": True, "stream_options": {"include_usage": True}}
    ).events
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert {k: v for k, v in events[-1]["usage"].items() if k != "prompt_tokens_details"} == {
        k: v for k, v in whole["usage"].items() if k != "prompt_tokens_details"
    }
    for choice in whole["choices"]:
        deltas = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert [token for each in deltas for token in each["token_ids"]] == choice["token_ids"]
        assert "".join(each["text"] for each in deltas) == choice["text"]
        assert [each["finish_reason"] for each in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert deltas[0]["prompt_token_ids"] == PROMPT
        assert deltas[-1]["weight_versions"] == choice["weight_versions"]
        for name in choice["logprobs"] or ():
            assert [value for each in deltas for value in each["logprobs"][name]] == choice["logprobs"][name]


def test_chat_is_the_template_and_a_completion(served, engine):
    messages = [{"role": "user", "content": [{"type": "text", "text": "3+"}, {"type": "text", "text": "4="}]}]
    ask = {"messages": messages, "max_completion_tokens": 5, "seed": 3, "logprobs": True, "top_logprobs": 1}
    flags = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    chat = served.post("/v1/chat/completions", {**ask, **flags}).json
    ids = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+4="}], add_generation_prompt=True, return_dict=False
    )
    assert chat["prompt_token_ids"] == list(ids)
    assert served.post("/tokenize", {"messages": messages}).json["tokens"] == list(ids)
    [output] = engine.generate([list(ids)], SamplingParams(max_tokens=5, seed=3))
    [choice] = chat["choices"]
    assert choice["message"] == {"role": "assistant", "content": output.text}
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(output.logprobs)
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in output.token_ids
    ]
    streamed = served.post("/v1/chat/completions", {**ask, **flags, "stream": True}).events
    deltas = [event["choices"][0] for event in streamed]
    assert "".join(each["delta"]["content"] for each in deltas) == output.text
    assert [each["delta"].get("role") for each in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert streamed[0]["prompt_token_ids"] == list(ids)


def test_prompts_are_answered_prompt_major(served, engine):
    prompts = [[1, 2, 3], [9, 8], [4, 4, 4, 4]]
    answer = served.post(
        "/v1/completions", {"prompt": prompts, "n": 2, "seed": 1, "max_tokens": 3, "return_token_ids": True}
    ).json
    outputs = engine.generate(prompts, SamplingParams(n=2, seed=1, max_tokens=3))
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["token_ids"] for choice in answer["choices"]] == [list(each.token_ids) for each in outputs]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    texts = served.post("/v1/completions", {"prompt": ["3+4=", "a"], "max_tokens": 1}).json
    assert len(texts["choices"]) == 2


def test_given_tokens_are_scored(served, engine):
    sequences = [[5, 6, 7, 8], [100, 3]]
    scored = served.post("/v1/token_logprobs", {"token_ids": sequences, "top_logprobs": 2}).json["data"]
    told = served.post("/v1/completions", {"prompt": sequences, "max_tokens": 1, "prompt_logprobs": 2}).json[
        "choices"
    ]
    outputs = engine.generate(sequences, SamplingParams(max_tokens=1, prompt_logprobs=2))
    for entry, choice, output in zip(scored, told, outputs, strict=True):
        assert entry["logprobs"] == list(output.prompt_logprobs)
        assert entry["weight_versions"][0]["version"] == "initial"
        own = [
            position[str(token)]
            for token, position in zip(
                output.prompt_token_ids[1:], choice["prompt_logprobs"][1:], strict=True
            )
        ]
        assert [each["logprob"] for each in own] == list(output.prompt_logprobs[1:])
        for position, tops in zip(choice["prompt_logprobs"][1:], output.prompt_top_logprobs[1:], strict=True):
            ranked = sorted(position.items(), key=lambda item: item[1]["rank"])[:2]
            assert [(int(token), each["logprob"]) for token, each in ranked] == [
                (top.token_id, top.logprob) for top in tops
            ]


def test_without_max_tokens_the_context_is_filled(served):
    answer = served.post(
        "/inference/v1/generate",
        {"token_ids": [1] * 1000, "sampling_params": {"ignore_eos": True, "min_tokens": 20}},
    ).json
    assert len(answer["choices"][0]["token_ids"]) == 24


def test_stops(served):
    free = served.post("/v1/completions", ASK).json["choices"][0]
    token = free["token_ids"][3]
    stopped = served.post("/v1/completions", {**ASK, "stop_token_ids": [token]}).json["choices"][0]
    first = free["token_ids"].index(token)
    assert stopped["token_ids"] == free["token_ids"][: first + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", token)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b'{"prompt": "a", "max_tokens": 1, "seed": 1, "max_tokens": 9}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 1, "logit_bias": {"5": 1, "5": 2}}', "5"),
        (b'{"prompt": "a", "seed": 1, "s\\u0065ed": 1}', "seed"),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_its_name(served, content, name):
    """Which of the two was meant is not known, and parsers differ in which they take."""
    answer = served.raw("POST", "/v1/completions", content, content_type="application/json")
    assert (answer.status, answer.code, answer.json["error"]["param"]) == (400, "body/key-twice", name)


REFUSED = [
    ({"prompt": "a", "temprature": 1}, "body/unknown-field", "temprature"),
    ({"prompt": "a", "echo": True}, "parameter/not-supported", "echo"),
    ({"prompt": "a", "allowed_token_ids": [1]}, "parameter/not-supported", "allowed_token_ids"),
    ({"prompt": "a", "structured_outputs": {"regex": "a"}}, "parameter/not-supported", "structured_outputs"),
    ({"prompt": "a", "n": True}, "body/invalid", None),
    ({"prompt": "a", "seed": "1"}, "body/invalid", None),
    ({"prompt": "a", "seed": -1}, "body/invalid", None),
    ({"prompt": "a", "cache_salt": ""}, "body/invalid", None),
    ({"prompt": "a", "prompt_logprobs": -7}, "body/invalid", None),
    ({"prompt": "a", "logprobs": 101}, "limit", "logprobs"),
    ({"prompt": "a", "n": 4096}, "limit", "n"),
    ({"prompt": "a", "stop": ["x"] * 17}, "limit", "stop"),
    ({"prompt": [], "n": 1}, "bad-request", "prompt"),
    ({"prompt": [1, "a"]}, "bad-request", "prompt"),
    ({"prompt": [[1], []]}, "bad-request", "prompt"),
    ({"prompt": [10**30]}, "value/prompt", None),
    ({"prompt": [-1]}, "value/prompt", None),
    ({"prompt": [1], "max_tokens": 5000}, "value/sampling", None),
    ({"prompt": [1], "temperature": 0, "n": 2}, "value/sampling", None),
    ({"prompt": [1], "top_p": 1.5}, "value/sampling", None),
    ({"prompt": [1], "logit_bias": {"x": 1}}, "body/invalid", None),
    ({"prompt": [1], "stream": True, "prompt_logprobs": 1}, "bad-request", "prompt_logprobs"),
    ({"prompt": [1], "stream_options": {"include_usage": True}}, "bad-request", "stream_options"),
    ({"prompt": "a", "model": "other"}, "model/not-found", "model"),
    ({}, "body/invalid", None),
]


@pytest.mark.parametrize(("body", "code", "param"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(served, body, code, param):
    answer = served.post("/v1/completions", body)
    assert answer.status in (400, 404), answer.content
    assert answer.code == code
    assert answer.json["error"]["param"] == param


def test_a_template_of_a_request_is_refused_and_so_are_the_servers_own_arguments(served):
    ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert (
        served.post("/v1/chat/completions", {**ask, "chat_template": "{{ 1 }}"}).code
        == "parameter/not-supported"
    )
    for name in ("tokenize", "chat_template", "conversation"):
        answer = served.post("/v1/chat/completions", {**ask, "chat_template_kwargs": {name: "x"}})
        assert (answer.status, answer.json["error"]["param"]) == (400, "chat_template_kwargs")
    assert (
        served.post(
            "/v1/chat/completions", {**ask, "chat_template_kwargs": {"enable_thinking": False}}
        ).status
        == 200
    )
    assert served.post("/v1/chat/completions", {**ask, "max_completion_tokens": 2}).status == 400


def test_defaults_that_clients_write_out_are_taken(served):
    neutral = {
        "echo": False,
        "suffix": None,
        "use_beam_search": False,
        "priority": 0,
        "bad_words": [],
        "top_k": -1,
    }
    assert served.post("/v1/completions", {**ASK, **neutral}).status == 200


def test_bad_bodies(served):
    for content in (b"", b"{", b"[]", b'"a"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000):
        answer = served.raw("POST", "/v1/completions", content, content_type="application/json")
        assert answer.status == 400, content[:10]
    assert served.raw("POST", "/v1/completions", b"{}", content_type="text/plain").status == 415
    assert served.get("/v1/models?a=1").code == "query/unknown"

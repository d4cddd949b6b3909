"""Each peer answers in its documented shape, and what it says is what the model says when asked directly.

Here "directly" is torch on the model itself: nothing of the peers' own arithmetic is on the right of a comparison.
"""

import json
import math
from collections.abc import Iterator
from typing import Any
from urllib import error, request

import mlc_server
import pytest
import sglang_server
import tensorrt_llm_server
import tgi_server
import torch

from zerodrift import models

MODEL = "testbed:qwen3"
PROMPT = [43, 456, 79, 82, 264, 85, 315, 15]
TEXT = "Hello world,"


def call(url: str, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, Any]:
    """(status, JSON or text)."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    try:
        answer = request.urlopen(request.Request(url + path, data, {"content-type": "application/json"}))
        status, text = answer.status, answer.read().decode()
    except error.HTTPError as refused:
        status, text = refused.code, refused.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def events(url: str, path: str, body: Any) -> list[Any]:
    _, text = call(url, path, body)
    lines = [line.removeprefix("data:").strip() for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def model() -> Any:
    return models.load(MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return models.tokenizer(MODEL)


@pytest.fixture(scope="module")
def sglang() -> Iterator[str]:
    with sglang_server.serve(MODEL) as url:
        yield url


@pytest.fixture(scope="module")
def tgi() -> Iterator[str]:
    with tgi_server.serve(MODEL, prefill_logprobs=True) as url:
        yield url


@pytest.fixture(scope="module")
def tensorrt_llm() -> Iterator[str]:
    with tensorrt_llm_server.serve(MODEL) as url:
        yield url


@pytest.fixture(scope="module")
def mlc() -> Iterator[str]:
    with mlc_server.serve(MODEL) as url:
        yield url


def direct(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(output position, token): log-probabilities after the temperature and nothing else."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, -1)


def of(rows: torch.Tensor, output: list[int]) -> list[float]:
    return [float(row[token]) for row, token in zip(rows, output, strict=True)]


def sglang_body(**more: Any) -> dict[str, Any]:
    params = {"temperature": 0.7, "max_new_tokens": 8, "ignore_eos": True, **more.pop("sampling_params", {})}
    return {"input_ids": PROMPT, "return_logprob": True, "sampling_params": params, **more}


def test_sglang_returns_ids_and_tempered_logprobs(sglang: str, model: Any) -> None:
    _, answer = call(sglang, "/generate", sglang_body(top_logprobs_num=3, no_such_field=1))
    ids, meta = answer["output_ids"], answer["meta_info"]
    assert [row[1:] for row in meta["output_token_logprobs"]] == [[token, None] for token in ids]
    rows = direct(model, PROMPT, ids, 0.7)
    assert [row[0] for row in meta["output_token_logprobs"]] == pytest.approx(of(rows, ids), abs=2e-5)
    best = [[token for _, token, _ in row] for row in meta["output_top_logprobs"]]
    assert best == [row.topk(3).indices.tolist() for row in rows]
    assert meta["input_token_logprobs"] == []
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (8, 8, "default")


def test_sglang_filters_do_not_change_what_is_reported(sglang: str, model: Any) -> None:
    params = {"top_k": 2, "top_p": 0.6, "min_p": 0.1}
    _, answer = call(sglang, "/generate", sglang_body(sampling_params=params))
    rows = direct(model, PROMPT, answer["output_ids"], 0.7)
    values = [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
    assert values == pytest.approx(of(rows, answer["output_ids"]), abs=2e-5)


def test_sglang_greedy_has_no_temperature(sglang: str, model: Any) -> None:
    _, answer = call(sglang, "/generate", sglang_body(sampling_params={"temperature": 0}))
    rows = direct(model, PROMPT, answer["output_ids"])
    assert answer["output_ids"] == rows.argmax(-1).tolist()
    values = [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
    assert values == pytest.approx(of(rows, answer["output_ids"]), abs=2e-5)


def test_sglang_prompt_logprobs_are_raw_and_begin_with_null(sglang: str, model: Any) -> None:
    _, answer = call(
        sglang, "/generate", sglang_body(logprob_start_len=2, sampling_params={"max_new_tokens": 0})
    )
    given = answer["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in given] == PROMPT[2:]
    assert given[0][0] is None
    rows = direct(model, PROMPT[:3], PROMPT[3:])
    assert [row[0] for row in given[1:]] == pytest.approx(of(rows, PROMPT[3:]), abs=2e-5)
    assert answer["output_ids"] == []


def test_sglang_streams_everything_so_far(sglang: str) -> None:
    *chunks, done = events(sglang, "/generate", sglang_body(stream=True))
    assert done == "[DONE]"
    assert [len(chunk["output_ids"]) for chunk in chunks] == list(range(1, 9))
    assert chunks[0]["meta_info"]["finish_reason"] is None
    assert [row[1] for row in chunks[-1]["meta_info"]["output_token_logprobs"]] == chunks[-1]["output_ids"]


def test_sglang_seed_is_honoured_by_a_deterministic_server_alone(sglang: str) -> None:
    # Temperature 2, so that eight equal tokens of two unseeded draws are a matter of chance of under 1e-3.
    body = sglang_body(sampling_params={"temperature": 2.0, "sampling_seed": 7, "max_new_tokens": 16})
    with sglang_server.serve(MODEL, deterministic=True) as url:
        first, second = (call(url, "/generate", body)[1]["output_ids"] for _ in range(2))
    assert first == second
    drawn = {tuple(call(sglang, "/generate", body)[1]["output_ids"]) for _ in range(3)}
    assert len(drawn) > 1


@pytest.mark.parametrize(
    ("body", "status", "keys"),
    [
        ({"sampling_params": {}}, 400, {"error"}),
        ({"input_ids": "x"}, 400, {"object", "message", "type", "param", "code"}),
        ({"input_ids": PROMPT, "sampling_params": {"top_p": 0}}, 400, {"error"}),
        ({"input_ids": [5] * 1024}, 400, {"error"}),
    ],
)
def test_sglang_refusals(sglang: str, body: Any, status: int, keys: set[str]) -> None:
    got, answer = call(sglang, "/generate", body)
    assert (got, set(answer)) == (status, keys)


def test_sglang_fails_on_an_unknown_sampling_parameter(sglang: str) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"seed": 1}}
    assert call(sglang, "/generate", body) == (500, "Internal Server Error")


def test_sglang_counts_cached_tokens_and_flushes() -> None:
    with sglang_server.serve(MODEL) as url:
        cached = [call(url, "/generate", sglang_body())[1]["meta_info"]["cached_tokens"] for _ in range(2)]
        assert cached == [0, len(PROMPT) - 1]
        assert call(url, "/flush_cache", {})[0] == 200
        assert call(url, "/generate", sglang_body())[1]["meta_info"]["cached_tokens"] == 0


def test_sglang_weights_have_a_version() -> None:
    with sglang_server.serve(MODEL) as url:
        status, answer = call(url, "/update_weights_from_disk", {"model_path": MODEL, "weight_version": "3"})
        assert (status, answer["success"]) == (200, True)
        assert call(url, "/model_info")[1]["weight_version"] == "3"
        assert call(url, "/server_info")[1]["weight_version"] == "default"
        assert call(url, "/generate", sglang_body())[1]["meta_info"]["weight_version"] == "3"
        status, answer = call(url, "/update_weights_from_disk", {"model_path": "/no/such/place"})
        assert (status, set(answer)) == (400, {"success", "message", "num_paused_requests"})


def tgi_body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": TEXT, "parameters": {"max_new_tokens": 8, "details": True, "seed": 3, **parameters}}


def test_tgi_takes_text_and_returns_ids(tgi: str, model: Any, tokenizer: Any) -> None:
    prompt = tokenizer.encode(TEXT)
    assert [token["id"] for token in call(tgi, "/tokenize", {"inputs": TEXT})[1]] == prompt
    _, answer = call(tgi, "/generate", tgi_body(temperature=0.7))
    tokens = answer["details"]["tokens"]
    ids = [token["id"] for token in tokens]
    rows = direct(model, prompt, ids, 0.7)
    assert [token["logprob"] for token in tokens] == pytest.approx(of(rows, ids), abs=2e-5)
    assert answer["details"]["seed"] == 3
    assert call(tgi, "/generate", tgi_body(temperature=0.7))[1] == answer
    assert call(tgi, "/generate", {"inputs": prompt})[0] == 422


def test_tgi_reports_what_is_left_after_top_k(tgi: str, model: Any, tokenizer: Any) -> None:
    _, answer = call(tgi, "/generate", tgi_body(top_k=2, top_n_tokens=5))
    ids = [token["id"] for token in answer["details"]["tokens"]]
    rows = direct(model, tokenizer.encode(TEXT), ids)
    kept = rows.topk(2).values
    expected = [
        float(row[token] - left.logsumexp(0)) for row, token, left in zip(rows, ids, kept, strict=True)
    ]
    assert [token["logprob"] for token in answer["details"]["tokens"]] == pytest.approx(expected, abs=2e-5)
    assert [len(row) for row in answer["details"]["top_tokens"]] == [2] * len(ids)


def test_tgi_temperature_one_is_greedy_unless_told_to_sample(tgi: str, model: Any, tokenizer: Any) -> None:
    _, answer = call(tgi, "/generate", tgi_body(temperature=1.0))
    ids = [token["id"] for token in answer["details"]["tokens"]]
    assert ids == direct(model, tokenizer.encode(TEXT), ids).argmax(-1).tolist()
    assert answer["details"]["seed"] is None


def test_tgi_prefill_is_raw_begins_with_null_and_has_to_be_switched_on(
    tgi: str, model: Any, tokenizer: Any
) -> None:
    body, prompt = tgi_body(temperature=0.7, decoder_input_details=True), tokenizer.encode(TEXT)
    prefill = call(tgi, "/generate", body)[1]["details"]["prefill"]
    assert [token["id"] for token in prefill] == prompt
    assert prefill[0]["logprob"] is None
    rows = direct(model, prompt[:1], prompt[1:])
    assert [token["logprob"] for token in prefill[1:]] == pytest.approx(of(rows, prompt[1:]), abs=2e-5)
    with tgi_server.serve(MODEL) as url:
        assert call(url, "/generate", body)[1]["details"]["prefill"] == []


def test_tgi_streams_a_token_an_event(tgi: str) -> None:
    chunks = events(tgi, "/generate_stream", tgi_body(temperature=0.7))
    whole = call(tgi, "/generate", tgi_body(temperature=0.7))[1]
    assert [chunk["token"]["id"] for chunk in chunks] == [t["id"] for t in whole["details"]["tokens"]]
    assert [chunk["generated_text"] for chunk in chunks[:-1]] == [None] * 7
    assert chunks[-1]["generated_text"] == whole["generated_text"]
    assert events(tgi, "/generate_stream", tgi_body(top_p=1.0))[0]["error_type"] == "validation"


@pytest.mark.parametrize(
    "parameters", [{"temperature": 0}, {"top_p": 1.0}, {"top_k": 0}, {"top_n_tokens": 6}]
)
def test_tgi_refusals(tgi: str, parameters: dict[str, Any]) -> None:
    status, answer = call(tgi, "/generate", tgi_body(**parameters))
    assert (status, answer["error_type"]) == (422, "validation")


def test_tgi_refuses_what_it_cannot_read_in_plain_text(tgi: str) -> None:
    status, answer = call(tgi, "/generate", tgi_body(seed=-1))
    assert (status, type(answer)) == (422, str)
    assert call(tgi, "/generate", raw=b"{")[0] == 400


def test_tgi_completions_have_neither_ids_nor_logprobs(tgi: str) -> None:
    _, answer = call(tgi, "/v1/completions", {"prompt": TEXT, "max_tokens": 4, "logprobs": 5, "model": "tgi"})
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert choice["logprobs"] is None
    assert call(tgi, "/v1/completions", {"prompt": PROMPT})[0] == 422


def tensorrt_body(**more: Any) -> dict[str, Any]:
    asked = {"max_tokens": 8, "temperature": 0.7, "logprobs": 2, "detokenize": False, "ignore_eos": True}
    return {"model": "any", "prompt": PROMPT, **asked, **more}


def test_tensorrt_llm_returns_ids_without_text_and_raw_logprobs(tensorrt_llm: str, model: Any) -> None:
    _, answer = call(tensorrt_llm, "/v1/completions", tensorrt_body(seed=5))
    (choice,) = answer["choices"]
    ids = choice["token_ids"]
    assert choice["text"] == ""
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        of(direct(model, PROMPT, ids), ids), abs=2e-5
    )
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["top_logprobs"]) == len(ids) == 8
    again = call(tensorrt_llm, "/v1/completions", tensorrt_body(seed=5))[1]["choices"][0]
    assert again["token_ids"] == ids
    written = call(tensorrt_llm, "/v1/completions", tensorrt_body(seed=5, detokenize=True))[1]["choices"][0]
    assert (written["token_ids"], bool(written["text"])) == (None, True)


def test_tensorrt_llm_zero_logprobs_is_none(tensorrt_llm: str) -> None:
    _, answer = call(tensorrt_llm, "/v1/completions", tensorrt_body(logprobs=0))
    assert answer["choices"][0]["logprobs"] is None


def test_tensorrt_llm_streams_differences(tensorrt_llm: str) -> None:
    *chunks, done = events(tensorrt_llm, "/v1/completions", tensorrt_body(stream=True, seed=5))
    assert done == "[DONE]"
    whole = call(tensorrt_llm, "/v1/completions", tensorrt_body(seed=5))[1]["choices"][0]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == whole["token_ids"]


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({"no_such_field": 1}, {"error"}),
        ({"logprobs": 101}, {"error"}),
        ({"temperature": -1}, {"object", "message", "type", "param", "code"}),
        ({"echo": True}, {"object", "message", "type", "param", "code"}),
    ],
)
def test_tensorrt_llm_refusals(tensorrt_llm: str, more: dict[str, Any], keys: set[str]) -> None:
    status, answer = call(tensorrt_llm, "/v1/completions", tensorrt_body(**more))
    assert (status, set(answer)) == (400, keys)


def mlc_body(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.7, "logprobs": 5, "seed": 11, **more}


def test_mlc_returns_strings_and_six_digits_of_processed_logprobs(
    mlc: str, model: Any, tokenizer: Any
) -> None:
    _, answer = call(mlc, "/v1/completions", mlc_body(max_tokens=1))
    (choice,) = answer["choices"]
    assert set(choice) == {"finish_reason", "index", "logprobs", "text"}
    logprobs = choice["logprobs"]
    # No ids: the token is looked for among those that are written like it.
    row = direct(model, PROMPT, [0], 0.7)[0]
    written = ["".join(c for c in tokenizer.decode([i]) if "!" <= c <= "~") for i in range(len(row))]
    alike = [float(row[i]) for i, word in enumerate(written) if word == logprobs["tokens"][0]]
    assert min(abs(value - logprobs["token_logprobs"][0]) for value in alike) < 2e-5
    assert all(
        len(f"{abs(value):.10g}".replace(".", "").lstrip("0")) <= 6 for value in logprobs["token_logprobs"]
    )
    assert (
        call(mlc, "/v1/completions", mlc_body(max_tokens=1, top_k=1, min_p=0.5))[1]["choices"]
        == answer["choices"]
    )


def test_mlc_loses_the_logprobs_of_parts_of_characters(mlc: str) -> None:
    # At temperature 5 nearly every token is drawn alike, and half of this tokenizer's are single bytes.
    _, answer = call(mlc, "/v1/completions", mlc_body(temperature=5, max_tokens=24))
    assert len(answer["choices"][0]["logprobs"]["tokens"]) < answer["usage"]["completion_tokens"]


def test_mlc_greedy_logprobs_are_zero(mlc: str) -> None:
    (choice,) = call(mlc, "/v1/completions", mlc_body(temperature=0))[1]["choices"]
    assert set(choice["logprobs"]["token_logprobs"]) == {0.0}


def test_mlc_top_p_is_in_what_is_reported(mlc: str, model: Any) -> None:
    (choice,) = call(mlc, "/v1/completions", mlc_body(top_p=0.5, max_tokens=1))[1]["choices"]
    ranked = direct(model, PROMPT, [0], 0.7)[0].exp().sort(descending=True).values
    kept = ranked[: int((ranked.cumsum(0) - ranked < 0.5).sum())]
    expected = {round(math.log(value / kept.sum()), 4) for value in kept.tolist()}
    assert round(choice["logprobs"]["token_logprobs"][0], 4) in expected


def test_mlc_streams_and_ends_with_usage_when_asked(mlc: str) -> None:
    body = mlc_body(stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events(mlc, "/v1/completions", body)
    assert (done, last["choices"], last["usage"]["completion_tokens"] >= len(chunks)) == ("[DONE]", [], True)
    text = call(mlc, "/v1/completions", mlc_body())[1]["choices"][0]["text"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_mlc_refusals_come_in_two_shapes(mlc: str) -> None:
    status, answer = call(mlc, "/v1/completions", mlc_body(logprobs=6))
    assert (status, set(answer)) == (422, {"detail"})
    status, answer = call(mlc, "/v1/completions", mlc_body(best_of=2))
    assert (status, set(json.loads(answer))) == (400, {"object", "message", "code"})


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        (
            "sglang",
            ["/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/models"],
        ),
        ("tgi", ["/health", "/info", "/v1/models"]),
        ("tensorrt_llm", ["/health", "/version", "/server_info", "/v1/models"]),
        ("mlc", ["/metrics", "/v1/models"]),
    ],
)
def test_what_is_there_and_what_is_not(name: str, paths: list[str], request_: Any) -> None:
    url = request_.getfixturevalue(name)
    assert [call(url, path)[0] for path in paths] == [200] * len(paths)
    assert call(url, "/no/such/route")[0] == 404
    assert call(url, paths[0], {})[0] == 405


@pytest.fixture
def request_(request: Any) -> Any:
    """Pytest's own `request`, whose name is taken by urllib's."""
    return request

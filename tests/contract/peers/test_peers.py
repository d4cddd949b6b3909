"""What peers do by their documentation and no adapter asks for; what adapters ask for is in test_dialects.py.

Numbers are compared with torch on the model itself: nothing of the peers' own arithmetic is on the right.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib import error, request

import pytest
import sglang_server
import tensorrt_llm_server
import tgi_server
import torch

from zerodrift import models

MODEL = "testbed:qwen3"
PROMPT = [43, 456, 79, 82, 264, 85, 315, 15]
TEXT = "Hello world,"


def call(url: str, path: str, body: Any = None) -> tuple[int, Any]:
    """(status, JSON or text)."""
    data = None if body is None else json.dumps(body).encode()
    try:
        answer = request.urlopen(request.Request(url + path, data, {"content-type": "application/json"}))
        status, text = answer.status, answer.read().decode()
    except error.HTTPError as refused:
        status, text = refused.code, refused.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


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
    with tgi_server.serve(MODEL) as url:
        yield url


@pytest.fixture(scope="module")
def tensorrt_llm() -> Iterator[str]:
    with tensorrt_llm_server.serve(MODEL) as url:
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


def test_sglang_filters_do_not_change_what_is_reported(sglang: str, model: Any) -> None:
    params = {"top_k": 2, "top_p": 0.6, "min_p": 0.1}
    _, answer = call(sglang, "/generate", sglang_body(sampling_params=params))
    rows = direct(model, PROMPT, answer["output_ids"], 0.7)
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


def tgi_body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": TEXT, "parameters": {"max_new_tokens": 8, "details": True, "seed": 3, **parameters}}


def test_tgi_temperature_one_is_greedy_unless_told_to_sample(tgi: str, model: Any, tokenizer: Any) -> None:
    _, answer = call(tgi, "/generate", tgi_body(temperature=1.0))
    ids = [token["id"] for token in answer["details"]["tokens"]]
    assert ids == direct(model, tokenizer.encode(TEXT), ids).argmax(-1).tolist()
    assert answer["details"]["seed"] is None


def tensorrt_body(**more: Any) -> dict[str, Any]:
    asked = {"max_tokens": 8, "temperature": 0.7, "logprobs": 2, "detokenize": False, "ignore_eos": True}
    return {"model": "any", "prompt": PROMPT, **asked, **more}


def test_tensorrt_llm_zero_logprobs_is_none(tensorrt_llm: str) -> None:
    _, answer = call(tensorrt_llm, "/v1/completions", tensorrt_body(logprobs=0))
    assert answer["choices"][0]["logprobs"] is None


ABOUT = {"object", "message", "type", "param", "code"}
REFUSED: list[tuple[str, dict[str, Any], int, set[str] | type[str]]] = [
    ("sglang", {"sampling_params": {}}, 400, {"error"}),
    ("sglang", {"input_ids": "x"}, 400, ABOUT),
    ("sglang", {"input_ids": PROMPT, "sampling_params": {"top_p": 0}}, 400, {"error"}),
    ("sglang", {"input_ids": [5] * 1024}, 400, {"error"}),
    ("sglang", {"input_ids": PROMPT, "sampling_params": {"seed": 1}}, 500, str),
    *(
        ("tgi", tgi_body(**parameters), 422, {"error", "error_type"})
        for parameters in ({"temperature": 0}, {"top_p": 1.0}, {"top_k": 0}, {"top_n_tokens": 6})
    ),
    ("tgi", tgi_body(seed=-1), 422, str),
    ("tensorrt_llm", tensorrt_body(no_such_field=1), 400, {"error"}),
    ("tensorrt_llm", tensorrt_body(logprobs=101), 400, {"error"}),
    ("tensorrt_llm", tensorrt_body(temperature=-1), 400, ABOUT),
    ("tensorrt_llm", tensorrt_body(echo=True), 400, ABOUT),
]


@pytest.mark.parametrize(("name", "body", "status", "shape"), REFUSED)
def test_refusals_have_the_engines_own_shape(
    name: str, body: dict[str, Any], status: int, shape: set[str] | type[str], request_: Any
) -> None:
    path = "/v1/completions" if name == "tensorrt_llm" else "/generate"
    got, answer = call(request_.getfixturevalue(name), path, body)
    assert (got, type(answer) if isinstance(answer, str) else set(answer)) == (status, shape)


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        (
            "sglang",
            ["/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/models"],
        ),
        ("tgi", ["/health", "/info", "/v1/models"]),
        ("tensorrt_llm", ["/health", "/version", "/server_info", "/v1/models"]),
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

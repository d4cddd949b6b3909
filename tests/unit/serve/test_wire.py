"""Tables that must be whole: vLLM's parameters, the routes, and the document that is made of them."""

import json
import time

import msgspec
import pytest

from zerodrift.core import errors
from zerodrift.serve import wire
from zerodrift.serve.errors import CallRefused, refusal_of
from zerodrift.serve.openapi import document
from zerodrift.serve.parameters import SAMPLING, TEXT, Support
from zerodrift.serve.routes import BY_PATH, ROUTES


def test_every_parameter_is_a_field_or_refused():
    honoured = {name for name, row in SAMPLING.items() if row.support is Support.HONOURED}
    assert honoured == {*wire.VllmSampling.__struct_fields__}
    assert honoured - {"output_kind", "routed_experts_prompt_start"} <= {
        *wire.CompletionBody.__struct_fields__
    }
    for kind in (wire.CompletionBody, wire.Chat, wire.VllmSampling, wire.GenerateBody):
        assert not kind.refused.keys() & {*kind.__struct_fields__}


@pytest.mark.parametrize("name", [name for name, row in SAMPLING.items() if row.support is Support.REFUSED])
def test_a_refused_parameter_is_taken_where_it_asks_for_nothing_alone(name):
    body = {"token_ids": [1], "sampling_params": {}, "output_mode": "text"}
    for value in SAMPLING[name].neutral:
        wire.as_body({**body, "sampling_params": {name: value}}, wire.GenerateBody)
    for value in (
        "x",
        7,
        ["x"],
        {"x": 1},
        *({True, False} - {each for each in SAMPLING[name].neutral if each in (True, False)}),
    ):
        with pytest.raises(CallRefused) as refused:
            wire.as_body({**body, "sampling_params": {name: value}}, wire.GenerateBody)
        assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize("name", TEXT)
def test_what_is_of_the_text_asks_for_nothing_where_ids_alone_are_answered(name):
    """`renderers` sends skip_special_tokens=false with every request for ids."""
    for value in (None, True, False):
        wire.as_body({"token_ids": [1], "sampling_params": {name: value}}, wire.GenerateBody)
    for kind, body in (
        (wire.CompletionBody, {"prompt": "a"}),
        (wire.Chat, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        [value] = {True, False} - {*SAMPLING[name].neutral}
        with pytest.raises(CallRefused):
            wire.as_body({**body, name: value}, kind)


def test_routed_experts_are_not_reported_from_wherever_they_would_begin():
    """`verifiers` sends where a turn begins that goes on from the tokens of the one before."""
    body = wire.as_body(
        {"token_ids": [1], "sampling_params": {"routed_experts_prompt_start": 17}}, wire.GenerateBody
    )
    assert body.sampling_params.routed_experts_prompt_start == 17


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt":[' + b"[]," * 100_000 + b"[]]}",
        b'{"prompt":["\\"[",' + b"{}," * 100_000 + b"[]]}",
        b'{"logit_bias":{' + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}}",
        b"[" * 100_000,
        b'{"prompt":"' + b"[" * 100_000,
    ],
)
def test_parts_are_counted_before_they_are_made(content):
    begin = time.process_time()
    with pytest.raises(CallRefused) as refused:
        wire.read_body(content, wire.CompletionBody)
    assert refused.value.code == "limit"
    assert time.process_time() - begin < 0.5


def test_what_stands_in_a_text_is_no_part():
    text = '[{":"}]\\"' * 100_000
    assert wire.read_body(json.dumps({"prompt": text}).encode(), wire.CompletionBody).prompt == text


def test_one_is_not_true():
    """JSON knows numbers from truth, and so do we: `stream_interval: true` asks for something."""
    with pytest.raises(CallRefused):
        wire.as_body({"token_ids": [1], "sampling_params": {"stream_interval": True}}, wire.GenerateBody)


def test_the_document_has_every_route_and_every_body():
    told = document("1")
    assert {(path, method.upper()) for path, each in told["paths"].items() for method in each} == {
        (path, method) for path, each in BY_PATH.items() for method in each
    }
    schemas = told["components"]["schemas"]
    for route in ROUTES:
        if route.body is not None:
            assert schemas[route.body.__name__]["additionalProperties"] is False
    assert len({each["operationId"] for path in told["paths"].values() for each in path.values()}) == len(
        ROUTES
    )
    msgspec.json.encode(told)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.QueueFull("x"), 429),
        (errors.InvalidSampling("x"), 400),
        (errors.VersionConflict("x"), 409),
        (errors.UnsafePath("x"), 422),
        (errors.EngineStopped("x"), 503),
        (errors.InvariantBroken("x"), 500),
        (ValueError("/secret/path at 0x7f"), 500),
    ],
)
def test_statuses(error, status):
    refusal = refusal_of(error, "where")
    assert refusal.status == status
    if status == 429:
        assert int(refusal.headers["retry-after"]) >= 1
    if status == 500:
        assert "where" in refusal.message
        assert "secret" not in refusal.message

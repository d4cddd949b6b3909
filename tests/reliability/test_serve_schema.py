"""Every operation of the OpenAPI document, asked what it allows and what it does not: never 5xx, and no bit moves.

HYPOTHESIS_PROFILE=long asks 25 times as much.
"""

import sys
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

sys.path.append(str(Path(__file__).parents[1] / "unit" / "serve"))

from serving import ADMIN, serve

from zerodrift.serve.limits import ServeLimits
from zerodrift.serve.openapi import document
from zerodrift.serve.routes import ROUTES

CANARY = {"prompt": [3, 1, 4], "max_tokens": 4, "temperature": 0, "seed": 0, "logprobs": 0}
HEADERS = {"authorization": f"Bearer {ADMIN}"}
EXAMPLES = max(settings().max_examples // 25, 8)
OPERATIONS = {
    operation.label: operation
    for operation in (
        found.ok() for found in schemathesis.openapi.from_dict(document("1")).get_all_operations()
    )
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A small context: an answer that fills it is quick."""
    limits = ServeLimits(samples=4, request_s=30)
    yield from serve(tmp_path_factory.mktemp("root"), limits=limits, max_model_len=24)


@pytest.fixture(scope="module")
def before(server):
    return bits(server)


def bits(server):
    choice = server.post("/v1/completions", CANARY).json["choices"][0]
    return choice["text"], choice["logprobs"]


def test_every_route_is_asked():
    assert OPERATIONS.keys() == {f"{route.method} {route.path}" for route in ROUTES}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("label", OPERATIONS)
def test_an_operation(server, before, label, mode):
    operation = OPERATIONS[label]
    takes = operation.body or operation.query
    if mode is GenerationMode.NEGATIVE and not takes:
        return  # nothing that it takes could be wrong; unknown queries and bodies are refused elsewhere
    statuses = set()

    @settings(
        max_examples=EXAMPLES if takes else 1,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        answer = case.call(base_url=server.url, headers=HEADERS, timeout=60)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400 and answer.content:
            assert answer.json()["error"]["code"]

    ask()
    # Whatever it left behind: asleep, paused, an open update.
    server.admin("/wake_up")
    server.admin("/shutdown_weight_transfer_engine")
    assert bits(server) == before
    if mode is GenerationMode.NEGATIVE:
        assert statuses & {400, 409, 415, 422}, statuses

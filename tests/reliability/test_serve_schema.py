"""Every operation of the OpenAPI document, asked what it allows and what it does not: never 5xx, and no bit moves.

Asked of the server, and of a proxy before it. HYPOTHESIS_PROFILE=long asks 25 times as much.
"""

import sys
from pathlib import Path

import peft
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

sys.path.append(str(Path(__file__).parents[1] / "unit" / "serve"))

from serving import ADMIN, MODEL, serve
from shadowing import shadowing

from zerodrift import models
from zerodrift.serve.limits import ServeLimits
from zerodrift.serve.openapi import document
from zerodrift.serve.routes import ROUTES
from zerodrift.serve.shadow import routes as shadow

CANARY = {"prompt": [3, 1, 4], "max_tokens": 4, "temperature": 0, "seed": 0, "logprobs": 0}
HEADERS = {"authorization": f"Bearer {ADMIN}"}
EXAMPLES = max(settings().max_examples // 25, 8)
OPERATIONS = {
    operation.label: operation
    for operation in (
        found.ok() for found in schemathesis.openapi.from_dict(document("1")).get_all_operations()
    )
}
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
ASKED = [
    (label, mode)
    for label, operation in OPERATIONS.items()
    for mode in MODES
    # Where nothing is taken nothing could be wrong; unknown queries and bodies are refused elsewhere.
    if mode is GenerationMode.POSITIVE or operation.body or operation.query
]
PASSED = [f"{route.method} {route.path}" for route in shadow.ROUTES]
THERE = {
    "POST /v1/load_lora_adapter": {"lora_name": "there", "lora_path": "adapter", "load_inplace": True},
    "POST /load_lora_adapter": {"lora_name": "there", "lora_path": "adapter", "load_inplace": None},
    "POST /v1/unload_lora_adapter": {"lora_name": "there", "lora_int_id": None},
    "POST /update_weights": {"weight_dir": "weights", "update_info": None, "expect": None},
}
"""What lies on the disk, or is loaded: by chance alone nobody would ask for it. The weights are those that are served."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A small context: an answer that fills it is quick."""
    root = tmp_path_factory.mktemp("root")
    models.materialise(MODEL, root / "weights")
    peft.get_peft_model(models.load(MODEL), peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        root / "adapter"
    )
    limits = ServeLimits(samples=4, request_s=30)
    yield from serve(root, limits=limits, max_model_len=24)


@pytest.fixture(scope="module")
def proxy(server):
    with shadowing(server.url, key=ADMIN) as found:
        yield found


@pytest.fixture(scope="module")
def before(server):
    return bits(server)


def bits(server):
    choice = server.post("/v1/completions", CANARY).json["choices"][0]
    return choice["text"], choice["logprobs"]


def test_every_route_is_asked():
    assert OPERATIONS.keys() == {f"{route.method} {route.path}" for route in ROUTES}


def asked(url, label, mode):
    """Statuses of all answers; no code of an answer is 5xx, and every refusal says its own."""
    operation, statuses = OPERATIONS[label], set()

    @settings(
        max_examples=EXAMPLES if operation.body or operation.query else 1,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(case=operation.as_strategy(generation_mode=mode), is_there=st.booleans())
    def ask(case, is_there):
        if is_there and label in THERE and mode is GenerationMode.POSITIVE:
            case.body = THERE[label]
        answer = case.call(base_url=url, headers=HEADERS, timeout=60)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400 and answer.content:
            assert answer.json()["error"]["code"]

    ask()
    return statuses


def settled(server):
    """Whatever was left behind: asleep, paused, an open update, adapters."""
    server.admin("/wake_up")
    server.admin("/shutdown_weight_transfer_engine")
    for card in server.get("/v1/models").json["data"][1:]:
        assert server.admin("/v1/unload_lora_adapter", {"lora_name": card["id"]}).status == 200


@pytest.mark.parametrize(("label", "mode"), ASKED)
def test_an_operation(server, before, label, mode):
    if label == "POST /v1/unload_lora_adapter":
        assert server.admin("/load_lora_adapter", THERE["POST /load_lora_adapter"]).status == 200
    statuses = asked(server.url, label, mode)
    settled(server)
    assert bits(server) == before
    if mode is GenerationMode.NEGATIVE:
        assert statuses & {400, 409, 415, 422}, statuses
    elif label in THERE:
        assert 200 in statuses, "nothing was asked for that is there"


@pytest.mark.parametrize(("label", "mode"), [case for case in ASKED if case[0] in PASSED])
def test_an_operation_through_the_proxy(server, proxy, before, label, mode):
    asked(proxy.url, label, mode)
    settled(server)
    assert bits(server) == before
    assert bits(proxy) == before


def test_what_this_engine_does_not_have_is_its_own_404_through_the_proxy(proxy, server, before):
    for label in PASSED:
        method, path = label.split(" ")
        if path not in {route.path for route in ROUTES}:
            body = b"{}" if method == "POST" else None
            answer = proxy.raw(method, path, body, content_type="application/json", **HEADERS)
            assert answer.status == 404, label
    settled(server)
    assert bits(proxy) == before

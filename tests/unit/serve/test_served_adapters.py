"""Adapters by vLLM's routes: loaded from below the root, asked for as models, and each request keeps what it began with."""

import json
import threading
import time

import peft
import pytest
import torch
from serving import ADMIN, MODEL, serve

from zerodrift import exact, models
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.serve.limits import ServeLimits

LIMITS = ServeLimits(loras=3, lora_rank=8)
ASKED = {"prompt": [5, 17, 300], "max_tokens": 6, "seed": 3, "logprobs": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    yield from serve(tmp_path_factory.mktemp("root"), limits=LIMITS)


def trainer(seed, rank=4):
    """A model with an adapter that does something."""
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.get_peft_model(models.load(MODEL), config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0, 0.05)
    return model


def saved(served, name, seed=1, rank=4):
    """Where TRL puts them: below a hidden directory."""
    path = served.root / ".vllm_lora" / name
    trainer(seed, rank).save_pretrained(path)
    return str(path)


def load(served, name, path, route="/v1/load_lora_adapter", **more):
    return served.admin(route, {"lora_name": name, "lora_path": path, **more})


def unload(served, *names):
    return [served.admin("/v1/unload_lora_adapter", {"lora_name": name}).status for name in names]


def test_an_adapter_is_served_with_its_trainers_bits(served):
    before = served.post("/v1/completions", ASKED).json["choices"][0]
    answer = load(
        served, "policy-v1", saved(served, "policy-v1"), load_inplace=False, is_3d_lora_weight=False
    )
    assert (answer.status, answer.content) == (200, b"Success: LoRA adapter 'policy-v1' added successfully.")
    told = served.post("/v1/completions", {**ASKED, "model": "policy-v1"}).json
    [choice] = told["choices"]
    assert told["model"] == "policy-v1"
    assert choice["adapter"] == {"name": "policy-v1", "digest": answer.headers["x-adapter-digest"]}

    engine = Engine(MODEL)
    engine.load_adapter("a", served.root / ".vllm_lora" / "policy-v1")
    [output] = engine.generate([ASKED["prompt"]], SamplingParams(max_tokens=6, seed=3), lora="a")
    assert choice["token_ids"] == list(output.token_ids)
    assert choice["logprobs"]["token_logprobs"] == list(output.logprobs)
    [logprobs] = exact.token_logprobs(exact.prepare(trainer(1)), [output])
    assert logprobs.tolist() == list(output.logprobs)

    for route, body in (
        ("/inference/v1/generate", {"token_ids": ASKED["prompt"], "sampling_params": {"max_tokens": 1}}),
        ("/v1/token_logprobs", {"token_ids": [ASKED["prompt"]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "3+4="}], "max_tokens": 1}),
    ):
        [part] = (told := served.post(route, {**body, "model": "policy-v1"}).json).get("choices") or told[
            "data"
        ]
        assert (told["model"], part["adapter"]["name"]) == ("policy-v1", "policy-v1")
    after = served.post("/v1/completions", {**ASKED, "model": MODEL}).json["choices"][0]
    assert (after["logprobs"], after["adapter"]) == (before["logprobs"], None)
    assert after["logprobs"] != choice["logprobs"]
    assert unload(served, "policy-v1", "policy-v1") == [200, 404]


def test_they_are_listed_and_announced_as_vllm_does(served):
    load(served, "listed", saved(served, "listed"))
    base, adapter = served.get("/v1/models").json["data"]
    assert (base["id"], base["parent"]) == (MODEL, None)
    assert (adapter["id"], adapter["parent"], adapter["max_model_len"]) == (
        "listed",
        MODEL,
        base["max_model_len"],
    )
    info = served.get("/server_info?config_format=json", ADMIN).json
    assert info["vllm_config"]["lora_config"] == {"max_loras": 3, "max_lora_rank": 8}
    assert unload(served, "listed") == [200]


def test_a_request_keeps_the_adapter_that_it_began_with(served):
    """As TRL unloads and prime-rl replaces: while others still generate."""
    path, other = saved(served, "one", seed=1), saved(served, "two", seed=2)
    asked = {**ASKED, "max_tokens": 200, "ignore_eos": True, "model": "policy"}
    load(served, "policy", path)
    whole = served.post("/v1/completions", asked).json["choices"][0]
    found = []
    client = threading.Thread(target=lambda: found.append(served.post("/v1/completions", asked)))
    client.start()
    while not any(each.lora is not None for each in [*served.server._engine.scheduler.samples]):
        time.sleep(0.002)
    assert served.admin("/pause?mode=keep").status == 200
    assert load(served, "policy", other).status == 400  # vLLM's own route wants another name
    assert load(served, "policy", other, "/load_lora_adapter").status == 200
    served.admin("/resume")
    newer = served.post("/v1/completions", asked).json["choices"][0]
    assert unload(served, "policy") == [200]
    client.join()
    assert found[0].json["choices"][0]["logprobs"] == whole["logprobs"]
    assert found[0].json["choices"][0]["adapter"] == whole["adapter"] != newer["adapter"]
    assert newer["logprobs"] != whole["logprobs"]


def spoiled(served, name, change):
    path = served.root / name
    trainer(1).save_pretrained(path)
    change(path)
    return str(path)


def rewritten(**config):
    def change(path):
        file = path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))

    return change


def cut(path):
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def linked(path):
    file = path / "adapter_model.safetensors"
    (moved := path.parent / "elsewhere.safetensors").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(moved)


def long(path):
    (path / "adapter_model.safetensors").write_bytes(bytes(64 * 2**20))


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (rewritten(r=9), 422),
        (rewritten(r="4; drop"), 422),
        (rewritten(use_dora=True), 422),
        (lambda path: (path / "adapter_config.json").write_text("[" * 100_000), 422),
        (lambda path: (path / "adapter_config.json").unlink(), 422),
        (cut, 422),
        (long, 422),
        (linked, 422),
    ],
)
def test_what_is_no_adapter_is_refused_and_nothing_changes(served, tmp_path, change, status):
    before = served.post("/v1/completions", ASKED).json["choices"][0]["logprobs"]
    assert load(served, "bad", spoiled(served, tmp_path.name, change)).status == status
    assert [model["id"] for model in served.get("/v1/models").json["data"]] == [MODEL]
    assert served.post("/v1/completions", {**ASKED, "model": "bad"}).code == "model/not-found"
    assert served.post("/v1/completions", ASKED).json["choices"][0]["logprobs"] == before


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../b", "a/./b", "..", ".", "x" * 300, "a//b"])
def test_nothing_is_read_outside_the_root(served, path):
    assert load(served, "bad", path).status == 422


def test_names_and_numbers_have_limits(served):
    path = saved(served, "many")
    assert load(served, MODEL, path).status == 400
    assert load(served, "a", path, is_3d_lora_weight=True).code == "parameter/not-supported"
    assert served.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path}).status == 401
    assert [load(served, name, path).status for name in "abcd"] == [200, 200, 200, 409]
    checkpoint = served.root / "base"
    models.load(MODEL).save_pretrained(checkpoint)
    # An adapter beside another base would be another model under its name.
    assert served.admin("/update_weights", {"weight_dir": str(checkpoint)}).code == "engine/adapter-in-use"
    assert unload(served, *"abc") == [200] * 3
    assert served.admin("/update_weights", {"weight_dir": str(checkpoint)}).status == 200

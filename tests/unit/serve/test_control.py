"""Control calls as transactions: what is refused changes no bit, and what is taken is served whole."""

import json
import threading
import time

import pytest
import torch
from serving import ADMIN, MODEL, serve

from zerodrift import models
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.files import write_update
from zerodrift.weights.of_model import update_of

CANARY = {
    "prompt": [3, 1, 4, 1, 5],
    "max_tokens": 5,
    "temperature": 0,
    "logprobs": 0,
    "return_token_ids": True,
}


@pytest.fixture
def fresh(tmp_path):
    """A server whose weights a test may change."""
    yield from serve(tmp_path)


def changed(factor=1.25):
    model = models.load(MODEL)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(factor)
    return model


def saved(root, name="step_1", factor=1.25, dtype=None):
    model = changed(factor)
    (model if dtype is None else model.to(dtype)).save_pretrained(root / name)
    return root / name


def canary(server):
    [choice] = server.post("/v1/completions", CANARY).json["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def expected(model):
    [output] = Engine(model).generate([CANARY["prompt"]], SamplingParams(max_tokens=5, temperature=0))
    return list(output.token_ids), list(output.logprobs)


def transfer(server, directory, version=None):
    """The four calls of vLLM's client; all answers."""
    finish = {} if version is None else {"weight_version": version}
    return [
        server.admin("/init_weight_transfer_engine", {"init_info": {}}),
        server.admin("/start_weight_update"),
        server.admin("/update_weights", {"update_info": {"directory": str(directory)}}),
        server.admin("/finish_weight_update", finish),
    ]


def test_four_phases_serve_the_new_weights_under_their_label(fresh):
    before = canary(fresh)
    answers = transfer(fresh, saved(fresh.root), "step 1")
    assert [answer.status for answer in answers] == [200] * 4
    assert answers[-1].json["weight_version"] == "step 1"
    after = canary(fresh)
    assert after == expected(changed())
    assert after != before
    info = fresh.get("/weight_info", ADMIN).json
    assert (info["weight_version"], info["digest"]) == ("step 1", answers[-1].json["digest"])
    # A label is used once; the refused update changes nothing.
    assert transfer(fresh, saved(fresh.root, "step_2", 1.5), "step 1")[-1].code == "update/conflict"
    assert canary(fresh) == after


def test_without_a_version_it_is_called_auto_with_its_digest(fresh):
    first = transfer(fresh, saved(fresh.root))[-1].json
    second = fresh.admin("/update_weights", {"weight_dir": str(saved(fresh.root, "step_2", 1.5))}).json
    assert (first["weight_version"], second["weight_version"]) == ("auto-1", "auto-2")
    assert second["status"] == "ok"
    assert first["digest"] != second["digest"]
    assert canary(fresh) == expected(changed(1.5))
    relabelled = fresh.admin("/update_weight_version", {"new_version": "mine"}).json
    assert relabelled == {"success": True, "new_version": "mine", "digest": second["digest"]}
    assert canary(fresh) == expected(changed(1.5))


def test_what_the_trainer_said_is_held_against_what_it_sent(fresh):
    model = changed()
    told = update_of(model, "told")
    write_update(fresh.root, "told", told, checkpoint_state(model))
    assert fresh.admin("/update_weights", {"weight_dir": "told"}).json["weight_version"] == "told"
    other = changed(1.5)
    write_update(fresh.root, "damaged", update_of(other, "damaged"), checkpoint_state(other))
    file = fresh.root / "damaged" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = canary(fresh)
    refused = fresh.admin("/update_weights", {"weight_dir": "damaged"})
    assert (refused.status, refused.code) == (422, "record/digest")
    assert canary(fresh) == before


def test_finish_after_a_refused_update_aborts_it(fresh):
    before = canary(fresh)
    answers = transfer(fresh, fresh.root / "nothing")
    assert [answer.status for answer in answers] == [200, 200, 422, 409]
    assert answers[-1].code == "update/out-of-order"
    assert canary(fresh) == before
    assert fresh.admin("/finish_weight_update").status == 409
    assert [answer.status for answer in transfer(fresh, saved(fresh.root))] == [200] * 4


def test_calls_out_of_order_and_second_trainers(fresh):
    directory = {"update_info": {"directory": str(saved(fresh.root))}}
    for path, body in (
        ("/start_weight_update", None),
        ("/update_weights", directory),
        ("/finish_weight_update", {}),
    ):
        assert (fresh.admin(path, body).status, path) == (409, path)
    fresh.admin("/init_weight_transfer_engine", {"init_info": {}})
    assert fresh.admin("/start_weight_update", {"expect": "other"}).code == "update/conflict"
    assert fresh.admin("/start_weight_update", {"is_checkpoint_format": True}).status == 200
    assert fresh.admin("/start_weight_update", {}).code == "update/conflict"
    assert fresh.admin("/update_weights", {"weight_dir": "step_1"}).code == "update/conflict"
    assert fresh.admin("/update_weights", directory).status == 200
    assert fresh.admin("/update_weights", directory).status == 422  # every tensor came before
    assert fresh.admin("/finish_weight_update").status == 409
    assert fresh.admin("/shutdown_weight_transfer_engine").status == 200
    assert fresh.admin("/start_weight_update").status == 409


def write_nan(root):
    model = changed()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(root / "bad")


def write_pickle(root):
    (root / "bad").mkdir()
    (root / "bad" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def write_link(root):
    saved(root, "good")
    (root / "bad").symlink_to(root / "good")


def write_linked_file(root):
    saved(root, "good")
    (root / "bad").mkdir()
    (root / "bad" / "model.safetensors").symlink_to(root / "good" / "model.safetensors")


def write_outside(root):
    saved(root, "good")
    (root / "bad").mkdir()
    index = {"weight_map": {"model.norm.weight": "../good/model.safetensors"}}
    (root / "bad" / "model.safetensors.index.json").write_text(json.dumps(index))


def write_cut(root):
    file = saved(root, "bad") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def write_other(root):
    models.load("testbed:llama").save_pretrained(root / "bad")


def write_fewer(root):
    from safetensors.torch import load_file, save_file

    file = saved(root, "bad") / "model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[1:]), file)


BAD = [
    write_nan,
    write_pickle,
    write_link,
    write_linked_file,
    write_outside,
    write_cut,
    write_other,
    write_fewer,
]


def test_a_path_that_is_not_there_is_told_as_it_was_looked_for(tmp_path):
    """The root's own name in front of it is how most of them are wrong."""
    for server in serve(tmp_path):
        answer = server.admin("/update_weights", {"weight_dir": f"{tmp_path.name}/cut"})
        told = answer.json["error"]["message"]
        assert answer.status == 422
        assert f"{tmp_path.name}/{tmp_path.name}/cut is not there" in told
        assert "paths are taken from below --weight-root" in told
        assert str(tmp_path) not in told, "where it lies on this machine is nobody's business"


def test_bad_weights_are_refused_and_the_old_ones_serve_on(tmp_path_factory):
    """One server takes all of them: none leaves a trace."""
    root = tmp_path_factory.mktemp("root")
    server = next(running := serve(root))
    before, version = canary(server), server.get("/weight_info", ADMIN).json
    for number, write in enumerate(BAD):
        (inner := root / f"case{number}").mkdir()
        write(inner)
        answer = server.admin("/update_weights", {"weight_dir": str(inner / "bad")})
        assert answer.status == 422, (write.__name__, answer.content)
        assert canary(server) == before, write.__name__
    for path in ("/etc", "../..", "a/../b", "", "/", str(root), str(root.parent), "a\x00b", "x" * 5000):
        answer = server.admin("/update_weights", {"weight_dir": path})
        assert answer.status in (400, 422), path
    narrow = saved(root, "wide", dtype=torch.float64)
    assert server.admin("/update_weights", {"weight_dir": str(narrow)}).code == "model/invalid"
    for body in (
        {"weight_dir": None},
        {},
        {"update_info": {"names": []}},
        {"update_info": {}, "weight_dir": "a"},
    ):
        assert server.admin("/update_weights", body).status in (400, 409)
    nccl = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    assert (
        server.admin("/init_weight_transfer_engine", {"init_info": nccl}).code == "engine/capability-missing"
    )
    assert server.get("/weight_info", ADMIN).json == version
    assert canary(server) == before
    # Wider than the trainer saved it is no rounding.
    narrow = saved(root, "narrow", dtype=torch.bfloat16)
    assert server.admin("/update_weights", {"weight_dir": str(narrow)}).status == 200
    assert next(running, None) is None


def test_checksums_are_of_what_runs(fresh):
    checksums = fresh.admin("/weight_checker", {"action": "checksum"}).json["checksums"]
    assert fresh.admin("/weight_checker", {"action": "compare", "baseline": checksums}).json == {
        "match": True,
        "mismatches": [],
    }
    transfer(fresh, saved(fresh.root))
    told = fresh.admin("/weight_checker", {"action": "compare", "baseline": checksums}).json
    assert told == {"match": False, "mismatches": ["model.layers.0.mlp.down_proj.weight"]}
    assert fresh.admin("/weight_checker", {"action": "compare"}).status == 400
    assert fresh.admin("/weight_checker", {"action": "reset"}).status == 400


LONG = {
    "prompt": [7, 7, 7],
    "max_tokens": 120,
    "ignore_eos": True,
    "seed": 1,
    "logprobs": 0,
    "return_token_ids": True,
}


class InFlight(threading.Thread):
    """A request that takes a while."""

    def __init__(self, server, ask=LONG):
        super().__init__()
        self.server, self.ask, self.answer = server, ask, None
        self.start()
        # Its own, by its prompt: canaries are in flight too.
        while tuple(ask["prompt"]) not in [
            each.prompt for each in [*server.server._engine.scheduler.samples]
        ]:
            time.sleep(0.005)

    def run(self):
        self.answer = self.server.post("/v1/completions", self.ask)

    @property
    def choice(self):
        self.join(60)
        return self.answer.json["choices"][0]


def test_how_it_was_paused_says_what_becomes_of_kv(fresh):
    """Each pause with an update behind it, one after the other, while a request is in flight."""
    current = "initial"
    for number, (pause, kept, swaps) in enumerate(
        (
            ("mode=keep&clear_cache=false", True, True),
            ("mode=keep", False, True),
            ("mode=wait", False, False),
            ("mode=abort", False, False),
        )
    ):
        directory, label = saved(fresh.root, f"step_{number}", 1.25 + number), f"step {number}"
        request = InFlight(fresh)
        assert fresh.admin(f"/pause?{pause}").json == {"status": "paused"}
        assert fresh.get("/is_paused", ADMIN).json == {"is_paused": True}
        assert fresh.get("/health").status == 200
        assert transfer(fresh, directory, label)[-1].status == 200
        waits = threading.Thread(target=canary, args=(fresh,))
        waits.start()
        assert fresh.admin("/resume").json == {"status": "resumed"}
        choice = request.choice
        versions = [span["version"] for span in choice["weight_versions"]]
        assert versions == ([current, label] if swaps else [current])
        aborted = pause == "mode=abort"
        assert choice["finish_reason"] == ("abort" if aborted else "length")
        assert (len(choice["token_ids"]) < LONG["max_tokens"]) is aborted
        waits.join(60)
        assert not waits.is_alive()
        if swaps:
            assert exact_under_the_new(choice, directory) is not kept
        current = label


def exact_under_the_new(choice, directory):
    """Whether the tokens behind the swap have the logprobs that the new weights alone give them."""
    start = choice["weight_versions"][1]["start"]
    [scored] = Engine(str(directory), tokenizer=MODEL).generate(
        [LONG["prompt"]],
        SamplingParams(max_tokens=LONG["max_tokens"], ignore_eos=True, seed=1),
        [choice["token_ids"]],
    )
    return list(scored.logprobs[start:]) == choice["logprobs"]["token_logprobs"][start:]


def test_aborts_sleep_and_caches(fresh):
    request = InFlight(fresh, {**LONG, "request_id": "mine"})
    assert fresh.admin("/abort_requests", {"request_ids": ["other"]}).json["aborted"] == 0
    assert fresh.post("/v1/completions", {**LONG, "request_id": "mine"}).code == "engine/duplicate-request"
    assert fresh.admin("/reset_prefix_cache").json == {"success": False}
    assert fresh.admin("/abort_requests", {"request_ids": ["mine"]}).json == {
        "status": "aborted",
        "aborted": 1,
    }
    assert request.choice["finish_reason"] == "abort"
    assert fresh.admin("/reset_prefix_cache").json == {"success": True}
    assert fresh.admin("/reset_prefix_cache?reset_running_requests=true").status == 400
    assert fresh.admin("/sleep?level=2").status == 400
    assert fresh.admin("/sleep?level=1").json["freed_bytes"] == 0
    assert fresh.get("/is_sleeping", ADMIN).json == {"is_sleeping": True}
    assert fresh.admin("/resume").status == 409
    assert fresh.admin("/wake_up?tags=weights").status == 200
    assert fresh.get("/is_paused", ADMIN).json == {"is_paused": False}
    assert fresh.admin("/pause?mode=nonsense").status == 400
    assert fresh.get("/get_world_size", ADMIN).json == {"world_size": 1}
    canary(fresh)


def test_a_pause_that_waits_for_what_is_paused_is_refused(fresh):
    request = InFlight(fresh)
    fresh.admin("/pause?mode=keep")
    assert fresh.admin("/pause?mode=wait").code == "update/out-of-order"
    fresh.admin("/resume")
    assert request.choice["finish_reason"] == "length"


def test_versions_are_taken_up_again(tmp_path):
    state = tmp_path / "state"
    (root := tmp_path / "root").mkdir()
    server = next(running := serve(root, state=state))
    transfer(server, saved(root), "kept")
    after = canary(server)
    assert next(running, None) is None
    server = next(running := serve(root, state=state))
    assert server.get("/weight_info", ADMIN).json["weight_version"] == "kept"
    assert canary(server) == after
    assert next(running, None) is None
    assert list(state.iterdir())

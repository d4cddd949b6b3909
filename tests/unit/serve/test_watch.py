"""Is it alive, and is it right? What probes and dashboards are told when an engine is neither."""

import math
import threading
import time

import pytest
import torch
from serving import ADMIN, serve

from zerodrift.serve import watch
from zerodrift.serve.watch import kl_between

PATIENCE_S = 30


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Its canaries come at once, and every sample is scored again."""
    monkeypatch.setattr(watch, "LOOK_S", 0.02)
    monkeypatch.setattr(watch, "CANARY_S", 0.1)
    yield from serve(tmp_path, logprob_check_interval=1)


def figures(server):
    rows = [line.rsplit(" ", 1) for line in server.get("/metrics").content.decode().splitlines()]
    return {name: float(value) for name, value in rows if not name.startswith("#")}


def until(server, wanted):
    """The figures, when they are as wanted."""
    deadline = time.monotonic() + PATIENCE_S
    while not wanted(found := figures(server)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def touch(server, factor):
    """Weights change in memory, and nobody said so."""
    with torch.no_grad():
        server.server._engine.model.get_output_embeddings().weight[40:200].mul_(factor)


def same(found):
    return found.get('zerodrift_canaries_total{result="same"}', 0)


def test_while_all_is_well(fresh):
    told = fresh.get("/liveness").json
    assert told["status"] == "alive"
    assert told["last_step_age_s"] < PATIENCE_S
    fresh.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 4, "seed": 1})
    found = until(fresh, lambda each: same(each) >= 3)
    assert (found["zerodrift_parity_pass_rate"], found["zerodrift_canary_kl_nats"]) == (1, 0)
    assert found["zerodrift_healthy"] == 1


def test_a_canary_with_other_bits_is_not_ready_and_says_how_far_off_it_is(fresh):
    until(fresh, lambda each: same(each) >= 2)
    touch(fresh, 1 + 1e-3)
    found = until(fresh, lambda each: each.get('zerodrift_canaries_total{result="differs"}'))
    assert found["zerodrift_canary_kl_nats"] > 0
    assert found["zerodrift_healthy"] == 0
    answer = fresh.get("/health")
    assert (answer.status, answer.json["status"]) == (503, "failed")
    assert fresh.get("/liveness").status == 200, "to restart it would lose what somebody has to look at"
    touch(fresh, 1 / (1 + 1e-3))
    assert fresh.get("/health").status == 503, "nothing heals it but a look"


def test_new_weights_have_a_canary_of_their_own(fresh):
    from zerodrift import models

    until(fresh, lambda each: same(each) >= 2)
    changed = models.load("testbed:qwen3")
    with torch.no_grad():
        changed.get_output_embeddings().weight.mul_(1.01)
    changed.save_pretrained(fresh.root / "step_1")
    assert fresh.admin("/update_weights", {"weight_dir": "step_1"}).status == 200
    before = same(figures(fresh))
    found = until(fresh, lambda each: same(each) > before + 1)
    assert (found["zerodrift_canary_kl_nats"], found["zerodrift_healthy"]) == (0, 1)


def test_a_sample_with_other_bits_than_the_trainers_stops_the_engine(fresh):
    """Half of it was drawn by weights that nobody loaded."""
    answers = []
    ask = {"prompt": [5, 6], "max_tokens": 300, "ignore_eos": True, "seed": 1}
    asking = threading.Thread(target=lambda: answers.append(fresh.post("/v1/completions", ask)))
    asking.start()
    until(fresh, lambda each: each["zerodrift_engine_running"] == 1)
    fresh.post("/pause?mode=keep", None, ADMIN)
    touch(fresh, 1.5)
    fresh.post("/resume", None, ADMIN)
    asking.join(PATIENCE_S)
    [answer] = answers
    assert (answer.status, answer.code) == (503, "engine/stopped")
    assert fresh.get("/health").status == 503
    found = figures(fresh)
    assert (found["zerodrift_healthy"], found["zerodrift_parity_pass_rate"]) == (0, 0)
    assert fresh.post("/v1/completions", ask).status == 503
    assert fresh.get("/weight_info").status == 200


def test_an_engine_that_hangs_is_not_alive(fresh, monkeypatch):
    monkeypatch.setattr(watch, "HANG_S", 0.3)
    engine, over = fresh.server._engine, threading.Event()
    step = engine.step

    def hung():
        assert over.wait(PATIENCE_S)
        return step()

    monkeypatch.setattr(engine, "step", hung)
    asking = threading.Thread(target=fresh.post, args=("/v1/completions", {"prompt": [5], "max_tokens": 1}))
    asking.start()
    deadline = time.monotonic() + PATIENCE_S
    while fresh.get("/liveness").status == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert fresh.get("/liveness").json["status"] == "hangs"
    over.set()
    asking.join(PATIENCE_S)
    assert fresh.get("/liveness").status == 200


def test_the_kl_of_a_canary_is_of_what_both_drew():
    bits = ((5, 6), (-0.5, -1.0))
    assert kl_between(bits, bits) == 0
    assert kl_between(bits, ((5, 6), (-0.5, -1.1))) == pytest.approx((0.1 + math.expm1(-0.1)) / 2)
    assert kl_between(bits, ((5, 7), (-0.5, -1.0))) == math.inf

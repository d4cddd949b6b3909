"""Who may publish over what: one trainer after another, and none over one that it has not seen."""

import contextlib
import copy
import hashlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.unit.engine.update_history import broken_promises
from tests.unit.sync.test_publisher import TOKEN, model_of

from zerodrift.core.errors import EngineError, InvalidValue, ModelError, OutOfOrder, VersionConflict
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.updates import Updates
from zerodrift.sync.decisions import Decisions
from zerodrift.sync.gloo import GlooPeers
from zerodrift.sync.http import DIGEST, EXPECTED, HttpTarget, WeightServer, _content
from zerodrift.sync.publisher import WeightPublisher
from zerodrift.sync.target import InProcess
from zerodrift.weights.gathered import whole_state
from zerodrift.weights.of_model import update_of
from zerodrift.weights.registry import Kind
from zerodrift.weights.update import encode_update

ROOT = Path(__file__).parents[3]


@pytest.fixture
def updates(tmp_path: Path) -> Iterator[Updates]:
    engine = Engine(model_of(0), num_blocks=16, block_size=4, version="v0")
    with EngineLoop(engine) as loop, Updates(loop, tmp_path / "w") as made:
        yield made
        assert broken_promises(loop, made, tmp_path / "w") == []


@pytest.fixture
def server(updates: Updates) -> Iterator[WeightServer]:
    made = WeightServer(updates, TOKEN)
    yield made
    made.close()


@pytest.mark.parametrize("way", ["here", "http"])
def test_a_trainer_that_slept_does_not_publish_over_another(
    updates: Updates, server: WeightServer, way: str
) -> None:
    def target(name: str) -> Any:
        return InProcess(updates) if way == "here" else HttpTarget(server.address, TOKEN, name=name)

    fast, slow = (WeightPublisher(model_of(n), [target(f"t{n}")]) for n in (1, 2))
    for number in range(3):
        fast._model.lm_head.weight.data.mul_(1.1)
        fast.publish(f"fast {number}")
    with pytest.raises(VersionConflict, match="'v0' was expected"):
        slow.publish("slow")
    assert updates.current.label == "fast 2"
    # Started anew it has seen what serves.
    WeightPublisher(model_of(2), [target("again")]).publish("slow")
    assert updates.current.label == "slow"


def test_other_rotary_frequencies_are_not_published(updates: Updates) -> None:
    model = copy.deepcopy(model_of(1))
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(ModelError, match="inv_freq"):
        WeightPublisher(model, [InProcess(updates)]).publish("turned")
    assert updates.current.label == "v0"


def test_peers_need_a_place_to_look_for_decisions(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        peers = GlooPeers(dist.group.WORLD)
        with pytest.raises(InvalidValue, match="Decisions"):
            WeightPublisher(model_of(1), [peers])
        WeightPublisher(model_of(1), [peers], decisions=Decisions(tmp_path / "d"))
    finally:
        dist.destroy_process_group()


KILLED = """
import os, sys
from pathlib import Path
from tests.unit.sync.test_publisher import TOKEN, model_of
from zerodrift.sync.decisions import Decisions
from zerodrift.sync.http import HttpTarget
from zerodrift.sync.publisher import WeightPublisher

targets = [HttpTarget(address, TOKEN, name=address) for address in sys.argv[2:]]
targets[1].publish = lambda: os.kill(os.getpid(), 9)
decisions = Decisions(Path(sys.argv[1])) if sys.argv[1] else None
WeightPublisher(model_of(1), targets, decisions=decisions).publish("v1")
"""


@pytest.mark.parametrize("decided", [True, False])
def test_a_new_trainer_takes_over_from_one_that_was_killed_between_two_engines(
    updates: Updates, tmp_path: Path, decided: bool
) -> None:
    decisions = Decisions(tmp_path / "decisions") if decided else None
    engine = Engine(model_of(0), num_blocks=16, block_size=4, version="v0")
    with (
        EngineLoop(engine) as loop,
        Updates(loop, tmp_path / "b") as other,
        contextlib.closing(WeightServer(updates, TOKEN, decisions=decisions)) as one,
        contextlib.closing(WeightServer(other, TOKEN, decisions=decisions)) as two,
    ):
        where = str(tmp_path / "decisions") if decided else ""
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, where, one.address, two.address], cwd=ROOT, check=False
        )
        assert killed.returncode == -signal.SIGKILL
        assert (updates.current.label, other.current.label) == ("v1", "v0")
        targets = [HttpTarget(each.address, TOKEN, name=each.address) for each in (one, two)]
        with pytest.raises(OutOfOrder, match="take_over"):
            WeightPublisher(model_of(2), [targets[1]], decisions=decisions).publish("v2")
        assert [each.take_over().label for each in targets] == ["v1", "v1" if decided else "v0"]
        WeightPublisher(model_of(2), targets, decisions=decisions).publish("v2")
        assert (updates.current.label, other.current.label) == ("v2", "v2")


def test_a_trainer_that_stopped_in_the_middle_of_a_tensor_holds_nobody_up(
    updates: Updates, server: WeightServer
) -> None:
    first, model = HttpTarget(server.address, TOKEN, name="stopped"), model_of(1)
    update, tensors = update_of(model, "v1"), whole_state(model).tensors
    with first._connected() as call:
        call("POST", "/updates", encode_update(update), {EXPECTED: "v0"})
    name, content = "lm_head.weight", _content(tensors["lm_head.weight"])
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as half:
        lines = [
            f"PUT /updates/{update.identity}/{name} HTTP/1.1",
            f"Authorization: Bearer {TOKEN.hex()}",
            f"Content-Length: {len(content)}",
            f"{DIGEST}: {hashlib.sha256(content).hexdigest()}",
        ]
        half.sendall("\r\n".join([*lines, "", ""]).encode() + content[: len(content) // 2])
        other = HttpTarget(server.address, TOKEN, name="other", timeout_s=20)
        assert other.take_over().label == "v0"
        WeightPublisher(model_of(2), [other]).publish("v2")
        half.sendall(content[len(content) // 2 :])
        assert half.recv(100).startswith(b"HTTP/1.0 409")
    assert updates.current.label == "v2"


@pytest.mark.parametrize("way", ["here", "http"])
def test_what_was_decided_is_served_before_what_comes_next(
    updates: Updates, server: WeightServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    target = InProcess(updates) if way == "here" else HttpTarget(server.address, TOKEN, name="far")
    publisher = WeightPublisher(model_of(1), [target], decisions=Decisions(tmp_path / "decisions"))

    def fails(*_: Any, **__: Any) -> Any:
        raise EngineError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(updates._loop, "swap_weights", fails)
        with pytest.raises(EngineError, match="planted"):
            publisher.publish("v1")
    publisher._model.lm_head.weight.data.mul_(1.1)
    publisher.publish("v2")
    published = [each.version.label for each in updates.entries if each.kind is Kind.PUBLISHED]
    assert published == ["v0", "v1", "v2"]

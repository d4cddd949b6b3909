"""Two exact engines and one trainer: all have the new weights or none has."""

import contextlib
import hashlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.engine.update_history import broken_promises
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift.core.errors import (
    DigestMismatch,
    EngineError,
    EngineUnreachable,
    InvalidValue,
    NonFinite,
    OutOfOrder,
    RecordError,
    VersionConflict,
    ZerodriftError,
)
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.updates import Updates
from zerodrift.models.testbed_config import CONFIGS
from zerodrift.sync.decisions import Decisions
from zerodrift.sync.http import DIGEST, EXPECTED, HttpTarget, WeightServer, _content
from zerodrift.sync.publisher import WeightPublisher
from zerodrift.sync.target import InProcess
from zerodrift.weights.digest import model_digest
from zerodrift.weights.gathered import whole_state
from zerodrift.weights.of_model import update_of
from zerodrift.weights.update import encode_update

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "max_position_embeddings": 96,
}
TOKEN = bytes(range(32))


def model_of(number: int) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIGS["qwen3"], **SIZES})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + number / 64)
    return model


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Updates]]:
    with contextlib.ExitStack() as stack:
        made = []
        for name in "ab":
            engine = Engine(model_of(0), num_blocks=16, block_size=4, version="v0")
            loop = stack.enter_context(EngineLoop(engine))
            made.append(stack.enter_context(Updates(loop, tmp_path / name)))
        yield made
        for name, each in zip("ab", made, strict=True):
            # What a test has closed it has begun anew, and looked at.
            assert each._registry._closed or broken_promises(each._loop, each, tmp_path / name) == []


@pytest.fixture
def targets(engines: list[Updates]) -> Iterator[list[Any]]:
    """One in this process, and one behind HTTP."""
    server = WeightServer(engines[1], TOKEN)
    yield [InProcess(engines[0]), HttpTarget(server.address, TOKEN, name="far")]
    server.close()


def labels(engines: list[Updates]) -> list[str]:
    return [each.current.label for each in engines]


def test_both_serve_what_is_published(engines: list[Updates], targets: list[Any]) -> None:
    model = model_of(1)
    assert WeightPublisher(model, targets).publish("v1") == ()
    assert labels(engines) == ["v1", "v1"]
    assert {each._loop.engine.version.digest for each in engines} == {model_digest(model)}
    WeightPublisher(model_of(2), targets).publish("v2")
    assert labels(engines) == ["v2", "v2"]


def failing(target: Any, verb: str) -> None:
    def fails(*_: object) -> None:
        raise EngineError("planted")

    setattr(target, verb, fails)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("verb", ["prepare", "publish"])
def test_where_one_fails_none_serves_it(
    engines: list[Updates], targets: list[Any], which: int, verb: str
) -> None:
    before = [model_digest(each._loop.engine.model) for each in engines]
    failing(targets[which], verb)
    with pytest.raises(EngineError):
        WeightPublisher(model_of(1), targets).publish("v1")
    assert labels(engines) == ["v0", "v0"]
    assert [model_digest(each._loop.engine.model) for each in engines] == before
    # Nothing is left under way.
    del targets[which].__dict__[verb]
    WeightPublisher(model_of(2), targets).publish("v2")
    assert labels(engines) == ["v2", "v2"]


def test_what_is_decided_is_not_taken_back(
    engines: list[Updates], targets: list[Any], tmp_path: Path
) -> None:
    decisions = Decisions(tmp_path / "decisions")
    failing(targets[0], "publish")
    with pytest.raises(EngineError):
        WeightPublisher(model_of(1), targets, decisions=decisions).publish("v1")
    assert labels(engines) == ["v0", "v1"]
    # Who failed makes it up when it starts again.
    engines[0].close()
    with Updates(engines[0]._loop, tmp_path / "a", decided=decisions.made) as again:
        assert again.current.label == "v1"
        assert broken_promises(again._loop, again, tmp_path / "a") == []


def test_an_engine_that_decided_against_it_ends_it_for_all(
    engines: list[Updates], targets: list[Any], tmp_path: Path
) -> None:
    model, decisions = model_of(1), Decisions(tmp_path / "decisions")
    real = decisions.decide
    decisions.decide = lambda identity, *, made: real(identity, made=False)  # type: ignore[method-assign]
    with pytest.raises(VersionConflict):
        WeightPublisher(model, targets, decisions=decisions).publish("v1")
    assert labels(engines) == ["v0", "v0"]


def test_a_decision_is_yes_or_no(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue):
        Decisions(tmp_path).decide("0" * 64, made="yes")  # type: ignore[arg-type]


def test_a_decision_is_made_once(tmp_path: Path) -> None:
    decisions, name = Decisions(tmp_path), "a" * 64
    assert decisions.found(name) is None
    assert not decisions.made(name)
    assert decisions.decide(name, made=False) is False
    assert decisions.decide(name, made=True) is False
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(InvalidValue):
        decisions.found("../a")
    (tmp_path / name).write_bytes(b"perhaps")
    with pytest.raises(RecordError):
        decisions.found(name)


def test_errors_come_back_as_they_were_raised(engines: list[Updates], targets: list[Any]) -> None:
    bad = model_of(1)
    with torch.no_grad():
        bad.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(NonFinite):
        WeightPublisher(bad, [targets[1]]).publish("v1")
    WeightPublisher(model_of(1), [targets[1]]).publish("v1")
    with pytest.raises(VersionConflict):
        WeightPublisher(model_of(1), [targets[1]]).publish("v1")
    assert labels(engines) == ["v0", "v1"]


def test_http_refuses_what_is_not_an_update(engines: list[Updates], targets: list[Any]) -> None:
    address = targets[1]._address
    with pytest.raises(EngineError):
        HttpTarget(address, bytes(32), name="stranger").prepare(update_of(model_of(1), "v1"), {})
    with pytest.raises(EngineUnreachable):
        HttpTarget("127.0.0.1:1", TOKEN, name="nobody").prepare(update_of(model_of(1), "v1"), {})
    with pytest.raises(OutOfOrder):
        targets[1].publish()
    update = update_of(model_of(1), "v1")
    tensors = whole_state(model_of(1)).tensors
    with targets[1]._connected() as call, pytest.raises(OutOfOrder):
        call("PUT", f"/updates/{update.identity}/lm_head.weight", b"", {})
    # Whole, and never tried on the canary; and a message that was taken comes once more.
    message = "POST", "/updates", encode_update(update), {EXPECTED: "v0"}
    pushes = [
        ("PUT", f"/updates/{update.identity}/{name}", content, {DIGEST: hashlib.sha256(content).hexdigest()})
        for name, tensor in tensors.items()
        for content in [_content(tensor)]
    ]
    for again in (message, pushes[0], ("POST", f"/updates/{update.identity}/publish", b"", {})):
        with targets[1]._connected() as call:
            for each in (message, *pushes):
                call(*each)
            with pytest.raises(OutOfOrder):
                call(*again)
        with targets[1]._connected() as call:
            call("DELETE", f"/updates/{update.identity}", b"", {})
    assert labels(engines) == ["v0", "v0"]
    with pytest.raises(DigestMismatch):
        targets[1].prepare(update, {name: tensor + 1 for name, tensor in tensors.items()})
    targets[1].abort()
    targets[1].prepare(update, tensors)
    for path, content, code in (
        (f"/updates/{update.identity}/none", b"x", 409),
        (f"/updates/{update.identity}/lm_head.weight", b"x" * 10, 409),
        ("/elsewhere", b"", 409),
    ):
        connection = HTTPConnection(address, timeout=60)
        headers = {**targets[1]._headers, DIGEST: hashlib.sha256(content).hexdigest()}
        connection.request("PUT", path, content, headers)
        assert connection.getresponse().status == code
        connection.close()
    targets[1].publish()
    targets[1].roll_back()
    assert labels(engines) == ["v0", "v0"]


# --- a network that loses calls and answers ------------------------------------------------------------------------------


class Lossy(socketserver.ThreadingTCPServer):
    """Stands before a server. `loses` names a call and which way it is lost; after that, `deaf` connections get nothing."""

    allow_reuse_address = True

    def __init__(self, address: str, loses: str = "", way: str = "answer", deaf: int = 0) -> None:
        host, port = address.split(":")
        self.upstream, self.loses, self.way, self.deaf, self.lost = (host, int(port)), loses, way, deaf, 0
        super().__init__(("127.0.0.1", 0), LossyConnection)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class LossyConnection(socketserver.BaseRequestHandler):
    """One call: the server answers in HTTP/1.0, and closes."""

    def handle(self) -> None:
        ours: Any = self.server
        first = self.request.recv(2**16)
        hit = bool(ours.loses) and ours.loses.encode() in first.split(b"\r\n")[0]
        if ours.lost and ours.deaf:
            ours.deaf -= 1
            return
        ours.lost += hit
        if hit and ours.way == "call":
            return
        with socket.create_connection(ours.upstream) as upstream:
            upstream.sendall(first)
            up = threading.Thread(target=pump, args=(self.request, upstream))
            up.start()
            answer = b"".join(iter(lambda: upstream.recv(2**16), b""))
            if not hit:
                self.request.sendall(answer)
            self.request.shutdown(socket.SHUT_RDWR)
            up.join()


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(2**16):
            sink.sendall(part)


@pytest.fixture
def lossy(targets):
    """`lossy("/publish", "answer")`: a target behind such a network."""
    with contextlib.ExitStack() as stack:

        def opener(*loses, **more):
            between = stack.enter_context(Lossy(targets[1]._address, *loses, **more))
            return between, HttpTarget(between.address, TOKEN, name="far", timeout_s=30)

        yield opener


def test_a_call_to_publish_that_is_lost_leaves_all_at_the_old_version(engines, targets, lossy) -> None:
    between, far = lossy("/publish", "call")
    with pytest.raises(EngineUnreachable):
        WeightPublisher(model_of(1), [targets[0], far]).publish("v1")
    assert (labels(engines), between.lost) == (["v0", "v0"], 1)
    between.loses = ""
    WeightPublisher(model_of(2), [targets[0], far]).publish("v2")
    assert labels(engines) == ["v2", "v2"]


def test_an_answer_that_is_lost_is_asked_for(engines, targets, lossy) -> None:
    between, far = lossy("/publish", "answer")
    WeightPublisher(model_of(1), [targets[0], far]).publish("v1")
    assert (labels(engines), between.lost) == (["v1", "v1"], 1)
    WeightPublisher(model_of(2), [targets[0], far]).publish("v2")
    assert (labels(engines), between.lost) == (["v2", "v2"], 2)


def test_who_serves_it_and_cannot_say_so_is_brought_back(engines, targets, lossy) -> None:
    between, far = lossy("/publish", "answer", deaf=1)
    with pytest.raises(EngineUnreachable):
        WeightPublisher(model_of(1), [targets[0], far]).publish("v1")
    assert (labels(engines), between.lost) == (["v0", "v0"], 1)
    between.loses = ""
    WeightPublisher(model_of(2), [targets[0], far]).publish("v2")
    assert labels(engines) == ["v2", "v2"]


@pytest.mark.parametrize(("way", "serves"), [("call", "v0"), ("answer", "v1")])
def test_who_cannot_be_reached_at_all_is_told_of_and_not_wedged(engines, targets, lossy, way, serves) -> None:
    between, far = lossy("/publish", way, deaf=9)
    with pytest.raises(ZerodriftError, match="far could not be brought back"):
        WeightPublisher(model_of(1), [targets[0], far]).publish("v1")
    assert labels(engines) == ["v0", serves]
    between.loses, between.deaf = "", 0
    WeightPublisher(model_of(2), [targets[0], far]).publish("v2")
    assert labels(engines) == ["v2", "v2"]


@pytest.mark.parametrize("way", ["call", "answer"])
def test_an_update_whose_beginning_is_lost_leaves_nothing_under_way(engines, targets, lossy, way) -> None:
    between, far = lossy("POST /updates HTTP", way)
    with pytest.raises(EngineUnreachable):
        WeightPublisher(model_of(1), [targets[0], far]).publish("v1")
    between.loses = ""
    WeightPublisher(model_of(2), [targets[0], far]).publish("v2")
    assert labels(engines) == ["v2", "v2"]


def test_a_rollback_whose_answer_is_lost_is_none_that_failed(engines, targets, lossy) -> None:
    between, far = lossy("/rollback", "answer")
    failing(targets[0], "publish")
    with pytest.raises(EngineError, match="planted"):
        WeightPublisher(model_of(1), [far, targets[0]]).publish("v1")
    assert (labels(engines), between.lost) == (["v0", "v0"], 1)


def test_the_same_version_again_is_refused_and_stays(engines, targets) -> None:
    """Refused at its beginning: what is aborted then is not the update that serves."""
    for _ in range(2):
        with contextlib.suppress(VersionConflict):
            WeightPublisher(model_of(1), [targets[1]]).publish("v1")
        assert labels(engines) == ["v0", "v1"]


@pytest.mark.parametrize("address", ["", "nowhere", "host:port", "http://host:80/", "host:80/x", None])
def test_an_engine_is_at_a_host_and_a_port(address: Any) -> None:
    with pytest.raises(InvalidValue):
        HttpTarget(address, TOKEN, name="far")


def test_targets_need_names_of_their_own(targets: list[Any]) -> None:
    for wrong in ([], [targets[0], targets[0]]):
        with pytest.raises(InvalidValue):
            WeightPublisher(model_of(1), wrong)


def test_a_tied_tensor_is_sent_once() -> None:
    config = AutoConfig.for_model(**{**CONFIGS["qwen3"], **SIZES, "tie_word_embeddings": True})
    tensors, tied = whole_state(AutoModelForCausalLM.from_config(config))
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in tensors


def test_what_fsdp_shards_is_sent_whole(tmp_path: Path) -> None:
    plain, sharded = whole_state(model_of(1)), model_of(1)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        assert all(isinstance(each, DTensor) for each in sharded.parameters())
        tensors, tied = whole_state(sharded)
    finally:
        dist.destroy_process_group()
    assert tied == plain.tied
    assert tensors.keys() == plain.tensors.keys()
    assert all(type(each) is torch.Tensor or type(each) is torch.nn.Parameter for each in tensors.values())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in plain.tensors.items())

"""A server that reads directories and cannot go back: what is left on the disk, and what is refused before it is sent."""

import copy
from typing import Any

import pytest
import torch

from zerodrift import models
from zerodrift.backends.exact import ExactBackend
from zerodrift.core.errors import EngineError, EngineUnreachable, NoReceipt, OutOfOrder
from zerodrift.sync.canary import random_canary
from zerodrift.sync.ledger import ReceiptLedger
from zerodrift.sync.publisher import WeightPublisher
from zerodrift.sync.take import ReceiptTaker
from zerodrift.sync.target import ServerTarget

SPEC = "testbed:qwen3"


@pytest.fixture(scope="module")
def engine():
    return ExactBackend(SPEC)


@pytest.fixture(scope="module")
def model():
    return models.load(SPEC)


@pytest.fixture
def taker(engine, model, tmp_path):
    engine.engine.swap_weights(model.state_dict(), "step 0")
    canary = random_canary(model.config.vocab_size, 64, avoid=range(4))
    return ReceiptTaker(
        engine, canary, ReceiptLedger(tmp_path / "receipts", bytes(32)), place=("it", None), parts=False
    )


@pytest.fixture
def target(engine, tmp_path):
    return ServerTarget(engine, tmp_path / "exchange", models.materialise(SPEC, tmp_path / "A"), name="it")


def left(tmp_path) -> int:
    return len(list((tmp_path / "exchange").glob("*")))


def stepped(model: Any, number: int) -> Any:
    further = copy.deepcopy(model)
    with torch.no_grad():
        further.lm_head.weight[number].mul_(1.5)
    return further


def test_a_taker_that_was_not_started_stops_an_update_before_it_is_sent(
    engine, model, taker, target, tmp_path
):
    with pytest.raises(OutOfOrder):
        WeightPublisher(stepped(model, 1), [target], [taker]).publish("step 1")
    assert engine.engine.version.label == "step 0"
    assert (left(tmp_path), taker.ledger.receipts) == (0, ())


def test_the_last_versions_stay_on_the_disk_and_no_more(engine, model, taker, target, tmp_path):
    taker.start(model, "step 0")
    for number in range(1, 5):
        WeightPublisher(stepped(model, number), [target], [taker]).publish(f"step {number}")
    assert engine.engine.version.label == "step 4"
    assert left(tmp_path) == target.retain == 2


class Failing:
    """Another engine, that takes nothing."""

    name, goes_back = "other", True

    def prepare(self, *_: object) -> None:
        raise EngineError("planted")

    def abort(self) -> None: ...


def test_what_was_not_sent_is_removed_and_may_come_again(engine, model, taker, target, tmp_path):
    taker.start(model, "step 0")
    update = stepped(model, 1)
    publisher = WeightPublisher(update, [target, Failing()], [taker])
    publisher._targets.reverse()  # the server prepares first
    with pytest.raises(EngineError):
        publisher.publish("step 1")
    assert (left(tmp_path), engine.engine.version.label) == (0, "step 0")
    WeightPublisher(update, [target], [taker]).publish("step 1")
    # And once more: an answer was lost, say.
    WeightPublisher(update, [target], [taker]).publish("step 1")
    assert (left(tmp_path), engine.engine.version.label) == (1, "step 1")


def test_a_server_that_does_not_answer_may_still_read(engine, model, taker, target, tmp_path, monkeypatch):
    taker.start(model, "step 0")

    def lost(*_: object) -> None:
        raise EngineUnreachable("planted")

    publisher = WeightPublisher(stepped(model, 1), [target], [taker])
    monkeypatch.setattr(engine, "load_weights", lost)
    with pytest.raises(EngineUnreachable):
        publisher.publish("step 1")
    monkeypatch.undo()
    assert left(tmp_path) == 1
    with pytest.raises(NoReceipt):
        taker.ledger.stamp([], "it")
    WeightPublisher(stepped(model, 1), [target], [taker]).publish("step 1")
    assert engine.engine.version.label == "step 1"

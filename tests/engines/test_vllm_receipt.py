"""Receipts of a real vLLM server: what can go wrong with an update is seen and named, and rollouts stop until it is right."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engines.one_step import Weights, serving

from zerodrift.backends.vllm import VllmBackend
from zerodrift.core.errors import NoReceipt
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.sync.canary import random_canary
from zerodrift.sync.judge import Arrival
from zerodrift.sync.ledger import ReceiptLedger, require_receipt
from zerodrift.sync.publisher import WeightPublisher
from zerodrift.sync.take import ReceiptTaker
from zerodrift.sync.target import ServerTarget

pytestmark = pytest.mark.engines

FLAGS = "--dtype float32 --enforce-eager --max-model-len 1024 --served-model-name tiny --enable-prompt-tokens-details"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def backend(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    with serving(weights.a, FLAGS, tmp_path_factory.mktemp("log") / "server.log", {}) as opened:
        yield opened


@pytest.fixture
def taker(backend: VllmBackend, weights: Weights, tmp_path: Path) -> ReceiptTaker:
    """At A, as if nothing had happened before."""
    backend.load_weights(weights.a, WeightVersion("step 0"))
    backend.reset_cache()
    # Of two replicas one has half of the canaries: 40 sequences would be 20 witnesses, which are too few.
    canary = random_canary(512, 640, avoid=range(4))
    taker = ReceiptTaker(backend, canary, ReceiptLedger(tmp_path / "receipts", bytes(32)))
    taker.start(weights.old, "step 0")
    return taker


def rollouts(backend: VllmBackend) -> Sequence[Any]:
    [answer] = backend.generate([Request(Prompt((5, 6, 7)), SamplingParams(max_tokens=4, seed=0))])
    return answer.completions


def test_an_update_arrives_and_its_rollouts_are_let_in(
    taker: ReceiptTaker, backend: VllmBackend, weights: Weights, tmp_path: Path
) -> None:
    server = ServerTarget(backend, tmp_path / "exchange", weights.a, name="0")
    [receipt] = WeightPublisher(weights.new, [server], [taker]).publish("step 1")
    assert (receipt.arrival, receipt.cause, receipt.told) == (Arrival.CONFIRMED, None, "step 1")
    assert receipt.slope == pytest.approx(1, abs=0.1)
    made = rollouts(backend)
    assert require_receipt(taker.ledger.stamp(made, "0"), taker.ledger) == list(made)


def test_an_update_that_never_arrived_stops_the_rollouts_until_one_does(
    taker: ReceiptTaker, backend: VllmBackend, weights: Weights
) -> None:
    missed = taker.take(weights.new, "step 1")
    assert (missed.arrival, missed.cause) == (Arrival.MISSED, "weights/stale")
    with pytest.raises(NoReceipt):
        taker.ledger.stamp(rollouts(backend), "0")

    backend.load_weights(weights.b, WeightVersion("step 1, again"))
    backend.reset_cache()
    assert taker.take(weights.new, "step 1, again").arrival is Arrival.CONFIRMED
    assert taker.ledger.stamp(rollouts(backend), "0")


def test_a_label_without_its_weights(taker: ReceiptTaker, backend: VllmBackend, weights: Weights) -> None:
    backend.load_weights(weights.a, WeightVersion("step 1"))
    backend.reset_cache()
    receipt = taker.take(weights.new, "step 1")
    assert (receipt.arrival, receipt.cause) == (Arrival.MISSED, "weights/version-label")


def test_a_layer_that_is_missing(taker: ReceiptTaker, backend: VllmBackend, weights: Weights) -> None:
    backend.load_weights(weights.without, WeightVersion("step 1"))
    backend.reset_cache()
    receipt = taker.take(weights.new, "step 1")
    assert (receipt.arrival, receipt.cause) == (Arrival.MISSED, "weights/partial")
    assert receipt.message.endswith(": layer 1")


def test_a_prefix_cache_that_outlives_the_update(
    taker: ReceiptTaker, backend: VllmBackend, weights: Weights
) -> None:
    backend.load_weights(weights.b, WeightVersion("step 1"))
    receipt = taker.take(weights.new, "step 1")
    assert (receipt.arrival, receipt.cause) == (Arrival.MISSED, "weights/stale-prefix-cache")

    # With a salt of its own nothing old is found.
    assert taker.take(weights.new, "step 1", salt="step 1").arrival is Arrival.CONFIRMED


class HalfStale(VllmBackend):
    """Every second canary is answered by a replica that the update did not reach: this server, as it was before."""

    remembered: list[list[float]]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        now = super().score(sequences)
        return [
            old if number % 2 else new
            for number, (old, new) in enumerate(zip(self.remembered, now, strict=True))
        ]


def test_one_replica_of_two(taker: ReceiptTaker, backend: VllmBackend, weights: Weights) -> None:
    with contextlib.closing(HalfStale(backend._http.address, explicit=True, timeout_s=600)) as balanced:
        balanced.remembered = backend.score(taker.canary.sequences)
        backend.load_weights(weights.b, WeightVersion("step 1"))
        backend.reset_cache()
        taker.engine = balanced
        receipt = taker.take(weights.new, "step 1")
    assert (receipt.arrival, receipt.cause) == (Arrival.MISSED, "weights/replica")

"""A real vLLM of two ranks (`-tp 2`, two processes), one of which does not take an update: a receipt says which."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.one_step import Weights, serving

from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_launch import DEFAULTS
from zerodrift.core.version import WeightVersion
from zerodrift.sync.canary import random_canary
from zerodrift.sync.judge import Arrival
from zerodrift.sync.ledger import ReceiptLedger
from zerodrift.sync.take import ReceiptTaker

pytestmark = pytest.mark.engines

FLAGS = "--dtype float32 --enforce-eager --max-model-len 1024 --served-model-name tiny -tp 2 --worker-extension-cls deaf_rank.DeafRank"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def backend(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    path = [DEFAULTS.get("PYTHONPATH", ""), str(Path(__file__).with_name("ranks"))]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    with serving(weights.a, FLAGS, tmp_path_factory.mktemp("log") / "server.log", env) as opened:
        yield opened


@pytest.mark.parametrize("deaf", [None, 0, 1])
def test_the_rank_that_took_no_update_is_named(
    backend: VllmBackend, weights: Weights, tmp_path: Path, deaf: int | None
) -> None:
    def deafen(rank: int | None) -> None:
        backend._http.post("/collective_rpc", {"method": "deafen", "kwargs": {"rank": rank}})

    deafen(None)
    backend.load_weights(weights.a, WeightVersion("step 0"))
    backend.reset_cache()
    canary = random_canary(512, 640, avoid=range(4))
    taker = ReceiptTaker(backend, canary, ReceiptLedger(tmp_path / "receipts", bytes(32)))
    taker.start(weights.old, "step 0")

    deafen(deaf)
    backend.load_weights(weights.b, WeightVersion("step 1"))
    backend.reset_cache()
    receipt = taker.take(weights.new, "step 1")
    if deaf is None:
        assert (receipt.arrival, receipt.cause) == (Arrival.CONFIRMED, None)
        return
    assert (receipt.arrival, receipt.cause) == (Arrival.MISSED, "weights/rows")
    assert f"rank {deaf} of 2" in receipt.message

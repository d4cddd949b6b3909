"""The proxy before a real vLLM: a cache that nobody resets is not hit, samples are held against the trainer, every update has its
receipt, and it costs little."""

import contextlib
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "serve")]

from serving import ADMIN
from shadow_latency import measured
from shadowing import shadowing

from zerodrift import models
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_launch import launch_vllm, transfer_flags
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.models.directory import WEIGHTS
from zerodrift.sync.canary import random_canary
from zerodrift.sync.judge import Arrival
from zerodrift.sync.key import create_key, read_key
from zerodrift.sync.ledger import ReceiptLedger
from zerodrift.sync.take import ReceiptTaker

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
RELEASE = "vllm-0.32.0"
ADDED_S = 0.002
"""By the proxy to a request, at most: median of neighbours, direct and through."""
PAIRS, TRIES = 200, 5
LONG = tuple(range(4, 304))
"""Fills two blocks of the prefix cache of vLLM on a processor."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A, and B whose every tensor is a little larger."""
    root = tmp_path_factory.mktemp("root").resolve()
    a = load_file(models.materialise("testbed:qwen3", root / "A") / WEIGHTS)
    models.materialise("testbed:qwen3", root / "B")
    (root / "B" / WEIGHTS).unlink()
    save_file(
        {name: tensor * 1.01 for name, tensor in a.items()}, root / "B" / WEIGHTS, metadata={"format": "pt"}
    )
    return root


@pytest.fixture(scope="module")
def engine(checkpoints, tmp_path_factory):
    """Its address."""
    python = ROOT / ".engines" / RELEASE / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{RELEASE} is not installed: engines/install {RELEASE}")
    flags = "--dtype float32 --enforce-eager --max-model-len 1024 --served-model-name tiny --enable-prompt-tokens-details"
    log = tmp_path_factory.mktemp("log") / "server.log"
    arguments = [*flags.split(), *transfer_flags(python, {})]
    with (
        contextlib.chdir(ROOT),
        launch_vllm(python, checkpoints / "A", arguments, {}, log, timeout_s=900) as server,
    ):
        yield server.url


@pytest.fixture(scope="module")
def proxy(engine, checkpoints):
    told = {"model": str(checkpoints / "A"), "weight_root": checkpoints, "rescore_every": 1}
    with shadowing(engine, **told) as served:
        yield served


@pytest.fixture
def direct(engine, checkpoints):
    with opened(engine) as backend:
        backend.load_weights(checkpoints / "A", WeightVersion("step 0"))
        backend.reset_cache()
        yield backend


@pytest.fixture
def through(proxy, checkpoints):
    with opened(proxy.url, api_key=ADMIN) as backend:
        backend.load_weights(checkpoints / "A", WeightVersion("step 0"))
        yield backend


def opened(url, **more):
    return contextlib.closing(VllmBackend(url, explicit=True, timeout_s=300, **more))


def receipt(backend, checkpoints, directory):
    """Of an update from A to B, by a trainer that does not reset the cache."""
    a, b = (models.load(checkpoints / name) for name in "AB")
    taker = ReceiptTaker(
        backend, random_canary(512, 1024, avoid=range(4)), ReceiptLedger(directory, bytes(32)), parts=False
    )
    taker.start(a, "step 0")
    backend.load_weights(checkpoints / "B", WeightVersion("step 1"))
    return taker.take(b, "step 1")


def test_the_cache_that_outlives_an_update_is_hit_without_the_proxy(direct, checkpoints, tmp_path):
    found = receipt(direct, checkpoints, tmp_path)
    assert (found.arrival, found.cause) == (Arrival.MISSED, "weights/stale-prefix-cache")


def test_and_not_through_it(through, checkpoints, tmp_path):
    found = receipt(through, checkpoints, tmp_path)
    assert (found.arrival, found.cause) == (Arrival.CONFIRMED, None)
    assert found.told == "step 1"


def test_within_one_version_the_cache_is_shared(through):
    def cached():
        [answer] = through.generate([Request(Prompt(LONG), SamplingParams(max_tokens=1, seed=0))])
        return answer.completions[0].cached_tokens

    cached()
    assert cached() >= 128


def test_samples_are_scored_by_the_weights_of_each_version(engine, through, proxy, checkpoints):
    """The reference follows the update; an engine that got another one behind the proxy's back is seen."""

    def metric(name):
        lines = proxy.get("/metrics").content.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"zerodrift_shadow_{name}"))

    def ask():
        before = metric("scored_samples_total")
        through.generate([Request(Prompt((5, 6, 7)), SamplingParams(max_tokens=16, seed=0))])
        deadline = time.monotonic() + 60
        while metric("scored_samples_total") == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return metric("mismatch_last_nats")

    assert ask() < 1e-4
    through.load_weights(checkpoints / "B", WeightVersion("step 1"))
    assert ask() < 1e-4
    with opened(engine) as behind:
        behind.load_weights(checkpoints / "A", WeightVersion("step 0"))
    assert ask() > 1e-3


@pytest.fixture
def receipts(engine, checkpoints, tmp_path):
    """A proxy that takes them, the engine at A; and the key of its ledger."""
    with opened(engine) as backend:
        backend.load_weights(checkpoints / "A", WeightVersion("step 0"))
    create_key(tmp_path / "key")
    told = {"model": str(checkpoints / "A"), "weight_root": checkpoints, "requires_receipt": True}
    kept = {"receipts": tmp_path / "receipts", "receipt_key": tmp_path / "key", "receipt_tokens": 512}
    with shadowing(engine, **told, **kept) as served:
        yield served


def vouched(proxy):
    """Status of a request that waits for the receipt, what its answer says of that, and the whole ledger."""
    kept = proxy.server.settings
    answer = proxy.post("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2})
    ledger = ReceiptLedger(kept.receipts, read_key(kept.receipt_key))
    return answer.status, answer.headers.get("x-zerodrift-receipt"), ledger.receipts


@contextlib.contextmanager
def busy(engine):
    """Others generate all the while."""
    over, made = threading.Event(), []

    def generate():
        with opened(engine) as backend:
            while not over.is_set():
                asked = [
                    Request(Prompt((5, 6, seed)), SamplingParams(max_tokens=32, seed=0)) for seed in range(8)
                ]
                made.extend(backend.generate(asked))

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
    assert made


def test_an_update_has_its_receipt_and_so_has_one_of_nothing(engine, receipts, checkpoints):
    with opened(receipts.url, api_key=ADMIN) as through, busy(engine):
        through.load_weights(checkpoints / "B", WeightVersion("step 1"))
        status, says, [of_b] = vouched(receipts)
        assert (status, says) == (200, f"confirmed {of_b.id}")
        assert (of_b.arrival, of_b.told, of_b.slope) == (
            Arrival.CONFIRMED,
            "step 1",
            pytest.approx(1, abs=0.1),
        )
        through.load_weights(checkpoints / "B", WeightVersion("step 2"))
        status, says, [_, of_nothing] = vouched(receipts)
        assert (status, says) == (200, f"confirmed {of_nothing.id}")
        assert of_nothing.version.digest == of_b.version.digest


def test_an_update_that_never_arrived_under_a_new_label_is_missed_and_nobody_generates(
    engine, receipts, checkpoints
):
    with opened(receipts.url, api_key=ADMIN) as through, opened(engine) as behind:
        receipts.admin("/pause?mode=wait")
        through.load_weights(checkpoints / "B", WeightVersion("step 1"))
        behind.load_weights(checkpoints / "A", WeightVersion("step 1"))
        receipts.admin("/resume")
        status, _, [missed] = vouched(receipts)
        assert (status, missed.arrival, missed.cause) == (424, Arrival.MISSED, "weights/version-label")
        through.load_weights(checkpoints / "B", WeightVersion("step 1, again"))
        status, says, [_, again] = vouched(receipts)
        assert (status, says) == (200, f"confirmed {again.id}")


@pytest.fixture
def process(engine, checkpoints, tmp_path):
    """The address of a proxy in a process of its own, as a shell starts it."""
    arguments = ["serve", str(checkpoints / "A"), "--shadow-of", engine, "--port", "0"]
    log = tmp_path / "proxy.log"
    with log.open("wb") as file:
        running = subprocess.Popen(
            [sys.executable, "-m", "zerodrift.cli.main", *arguments], stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + 60
        while (said := re.search(r"listening on (\S+)", log.read_text())) is None:
            assert running.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield said[1]
    finally:
        running.terminate()
        assert running.wait(60) == 0


def test_it_adds_two_milliseconds_at_most(engine, process, capsys):
    """What else runs on the same cores only adds to it (0.8 to 1.6 ms seen): it is asked again, up to five times, where it did."""
    for _ in range(TRIES):
        added_s, says = measured(engine, process, PAIRS)
        with capsys.disabled():
            sys.stdout.write(f"\n{says}")
        if added_s < ADDED_S:
            return
    pytest.fail(f"{TRIES} times more than {1000 * ADDED_S:g} ms: {says}")

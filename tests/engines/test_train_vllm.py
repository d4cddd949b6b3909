"""`zerodrift train` on rollouts of a real vLLM: the mismatch is measured at its floor, a server that is gone ends the run by name."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zerodrift import models
from zerodrift.backends.launch import LaunchedServer
from zerodrift.backends.vllm_launch import launch_vllm, transfer_flags
from zerodrift.config.load import load
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import ContractViolation, ExactError, UpdateFailed
from zerodrift.monitor.decision import State
from zerodrift.train.records import RunFiles
from zerodrift.train.setup import ServerPlace, begin, replay, resume

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
RELEASE = "vllm-0.32.0"
# A prefill in chunks with a seed kills vLLM's CPU worker: no step is that long (docs/vllm.yaml).
FLAGS = (
    "--dtype float32 --enforce-eager --max-model-len 512 --max-num-batched-tokens 8192 --enable-prompt-tokens-details "
    "--generation-config vllm --logprobs-mode"
)
FLOOR = 1e-5
"""Nats, on average: two implementations in fp32 were 5e-7 to 1.3e-6 apart."""


def config(url: str, *settings: str) -> RunConfig:
    small = (
        "model.path=testbed:qwen3", "sampling_defaults.max_tokens=4", "train.groups=4", "train.samples=4", "train.warmup_steps=3",
        "train.rescore_one_in=1", "train.checkpoint_every=2", "train.steps=5", "train.learning_rate=0.00005",
        "train.zero_advantage=keep", "train.entropy_coef=0.05", "train.rollouts=vllm", f"engine.url={url}",
    )  # fmt: skip
    return load(None, [*small, *settings])


@contextlib.contextmanager
def served(root: Path, logprobs_mode: str) -> Iterator[LaunchedServer]:
    python = ROOT / ".engines" / RELEASE / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{RELEASE} is not installed: engines/install {RELEASE}")
    flags = [*FLAGS.split(), logprobs_mode, *transfer_flags(python, {})]
    with (
        contextlib.chdir(ROOT),
        launch_vllm(
            python, root / "model", flags, {}, root / f"{logprobs_mode}.log", timeout_s=600
        ) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vllm")
    models.materialise("testbed:qwen3", root / "model")
    return root


def check(directory: Path, steps: int, resumed_at: int | None = None) -> None:
    files = RunFiles(directory)
    found = files.steps()
    assert len(found) == steps
    assert len({each.digest for each in found}) == steps, "something was learnt at every step"
    measured = [each for each in found if each.step != resumed_at]
    for each in measured:
        assert each.rescored == each.tokens
        assert 0 < each.mismatch < FLOOR
        assert each.mismatch_largest >= each.mismatch
        assert each.state is State.OK
    told = [json.loads(line)["metrics"] for line in (directory / "steps.jsonl").read_text().splitlines()]
    seen = [told[each.step]["zerodrift/mismatch/mean_abs"] for each in measured]
    assert seen == pytest.approx([each.mismatch for each in measured]), "the monitor saw the same"


def test_rollouts_of_a_vllm(root: Path) -> None:
    """One run over two servers: of raw logprobs, which are those of the policy at temperature 1 alone, and of processed ones."""
    directory = root / "run"
    with served(root, "raw_logprobs") as server:
        with pytest.raises(ContractViolation, match=r"raw logprobs are the model's own.*temperature=0\.7"):
            begin(config(server.url, "sampling_defaults.temperature=0.7"), directory)
        assert not RunFiles(directory).exists
        training = begin(config(server.url), directory)
        training.run(3)
        check(directory, 3)
        server.stop()
        # Everything was sent, and the server is not there to read it.
        with pytest.raises(
            UpdateFailed, match=r"did not take the weights of 'step 4 of .*go on with --resume"
        ):
            training.run(5)
        training.close()
    assert len(RunFiles(directory).steps()) == 3
    with served(root, "processed_logprobs") as server:
        training = resume(directory, place=ServerPlace(server.url))
        training.run(5)
        training.close()
        # Of what the first server had made for step 3, weights of then are kept by nobody.
        check(directory, 5, resumed_at=3)
        assert RunFiles(directory).steps()[3].mismatch is None
        with pytest.raises(ExactError, match="took its rollouts from a vLLM"):
            replay(directory, root / "scratch")
        cooler = config(server.url, "sampling_defaults.temperature=0.7", "train.steps=2")
        training = begin(cooler, root / "cooler")
        training.run(2)
        training.close()
        check(root / "cooler", 2)
        told = subprocess.run(
            [sys.executable, "-m", "zerodrift.cli.main", "train", "--out", str(root / "cooler"), "--resume", "--steps", "3"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        assert " nats on average, " in told.stdout
        has_other_weights(root, server)


def has_other_weights(root: Path, server: LaunchedServer) -> None:
    """Under the label that was sent: what a vLLM says of itself shows nothing, and the mismatch everything."""
    training = begin(config(server.url, "train.max_lag=0"), root / "stale")
    training.run(2)
    source: Any = training.source
    # Without the warm-up and both steps.
    source._server.backend.load_weights(root / "model", source._wire)
    training.run(3)
    training.close()
    *before, last = RunFiles(root / "stale").steps()
    assert all(each.trained for each in before)
    assert last.mismatch is not None
    assert last.mismatch > 1e3 * FLOOR
    assert not last.trained, "the monitor kept it back"

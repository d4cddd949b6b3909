"""kill -9 in the middle of a training, and `--resume`: the same weights at every step as a run that nobody killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerodrift.train.records import STEPS, RunFiles

SMALL = (
    "train.groups=3", "train.samples=4", "train.warmup_steps=3", "train.checkpoint_every=4", "sampling_defaults.max_tokens=3",
)  # fmt: skip
PATIENCE_S = 300


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "zerodrift.cli.main", "train", *arguments]


def settings() -> list[str]:
    return [word for each in SMALL for word in ("--set", each)]


def killed_after(steps: int, directory: Path, total: int, number: signal.Signals) -> int:
    """Begin a run, and send it a signal once so many steps are on the disk."""
    process = subprocess.Popen(command("--steps", str(total), "--out", str(directory), *settings()))
    deadline = time.monotonic() + PATIENCE_S
    while len(lines(directory)) < steps and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    return process.wait(PATIENCE_S)


def lines(directory: Path) -> list[str]:
    path = directory / STEPS
    return path.read_text().splitlines() if path.exists() else []


def digests(directory: Path) -> list[str]:
    return [each.digest for each in RunFiles(directory).steps()]


def run(*arguments: str) -> str:
    found = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=10 * PATIENCE_S, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize(
    "total", [pytest.param(4, id="4"), pytest.param(30, id="30", marks=pytest.mark.long)]
)
def test_killed_and_gone_on_with(tmp_path: Path, total: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run("--steps", str(total), "--out", str(whole), *settings())
    assert killed_after(total // 2 + 1, broken, total, signal.SIGKILL) == -signal.SIGKILL
    assert len(lines(broken)) < total, "it was over before it was killed, so this showed nothing"
    run("--out", str(broken), "--resume")
    assert digests(broken) == digests(whole)
    assert f"{total} steps done again: equal digests at every step" in run("--replay", str(broken))


@pytest.mark.long
def test_told_to_end_it_finishes_the_step(tmp_path: Path) -> None:
    assert killed_after(2, tmp_path / "run", 500, signal.SIGTERM) == 128 + signal.SIGTERM
    done = len(lines(tmp_path / "run"))
    assert done >= 2
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:06}").is_dir(), "the last step is kept"

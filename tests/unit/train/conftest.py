"""A training that takes a second: few groups of a built-in model, every sample scored again."""

from pathlib import Path

import pytest

from zerodrift.config.load import load
from zerodrift.train.setup import begin

SMALL = (
    "model.path=testbed:llama", "sampling_defaults.max_tokens=3", "train.groups=3", "train.samples=4",
    "train.warmup_steps=3", "train.rescore_one_in=1", "train.checkpoint_every=3", "train.steps=6",
)  # fmt: skip


def small(*settings: str):
    return load(None, [*SMALL, *settings])


@pytest.fixture
def run(tmp_path: Path):
    """`run("train.kv=keep")`: a training in a directory of its own, closed at the end."""
    opened = []

    def opener(*settings: str, at: str = "run"):
        opened.append(begin(small(*settings), tmp_path / at))
        return opened[-1]

    yield opener
    for training in opened:
        training.close()

"""An update as RL makes one, for servers: before it, after it, and torn."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from zerodrift import models
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_launch import launch_vllm, transfer_flags
from zerodrift.models.directory import WEIGHTS
from zerodrift.sync.canary import random_canary

ROOT = Path(__file__).parents[2]
RELEASE = "vllm-0.32.0"
LAYER = "model.layers.1."
RATE = 1e-5
"""Of one step of AdamW: what RL does to a model between two rollouts."""


class Weights:
    """A, what one step makes of it, and that without a layer, as models and as directories."""

    def __init__(self, root: Path) -> None:
        self.old = models.load("testbed:qwen3")
        self.new = copy.deepcopy(self.old).train()
        ids = torch.tensor(random_canary(512, 64, seed=1).sequences)
        self.new(ids, labels=ids).loss.backward()
        torch.optim.AdamW(self.new.parameters(), lr=RATE, weight_decay=0.0).step()
        self.new.zero_grad()
        self.new.eval()
        self.a, self.b, self.without = (models.materialise("testbed:qwen3", root / name) for name in "ABW")
        before = load_file(self.a / WEIGHTS)
        after = {
            name: tensor.detach().clone() for name, tensor in self.new.state_dict().items() if name in before
        }
        torn = {name: before[name] if name.startswith(LAYER) else tensor for name, tensor in after.items()}
        for directory, tensors in ((self.b, after), (self.without, torn)):
            (directory / WEIGHTS).unlink()
            save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


@contextlib.contextmanager
def serving(checkpoint: Path, flags: str, log: Path, env: Mapping[str, str]) -> Iterator[VllmBackend]:
    """A real vLLM over `checkpoint`, that takes updates as directories."""
    python = ROOT / ".engines" / RELEASE / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{RELEASE} is not installed: engines/install {RELEASE}")
    with (
        contextlib.chdir(ROOT),
        launch_vllm(
            python, checkpoint, [*flags.split(), *transfer_flags(python, {})], env, log, timeout_s=1800
        ) as server,
        contextlib.closing(VllmBackend(server.url, explicit=True, timeout_s=600)) as opened,
    ):
        yield opened

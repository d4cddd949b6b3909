"""An update as RL makes one, for servers: before it, after it, and torn."""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from zerodrift import models
from zerodrift.models.directory import WEIGHTS
from zerodrift.sync.canary import random_canary

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

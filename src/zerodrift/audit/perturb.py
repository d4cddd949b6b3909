"""A known change to a checkpoint, by groups, so that what arrived and what did not can be told apart.

Every tensor is moved by noise of a fixed share of its own spread. Groups are layers, or kinds of tensor: what an
update path forgets, it forgets by one or the other.
"""

import copy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.completion import Completion
from zerodrift.models.family.base import Family
from zerodrift.models.family.registry import family_of

Floats = NDArray[np.float64]
SHARES = (0.02, 0.06, 0.2)
"""Noise in units of a tensor's own spread. The first moves logprobs by about 0.1 nat, a thousand times the fp32 floor;
in bf16, whose floor is 0.02 to 0.03 on built-in models, the others are needed."""
Grouping = Callable[[Family, str], str]
"""Tensor name to the name of its group, in a family of models."""


class GroupedWeights:
    """Two models, old and new, that differ by a known amount in every group."""

    def __init__(self, old: Any, new: Any) -> None:
        """Both models stay as they are."""
        self.old, self.new = old, new
        self._family = family_of(new)

    def groups(self, grouping: Grouping) -> tuple[str, ...]:
        """Names of the groups, in the order of the forward."""
        return tuple(dict.fromkeys(grouping(self._family, name) for name in self.new.state_dict()))

    def score(self, model: Any, completions: Sequence[Completion]) -> Floats:
        """Logprobs of all output tokens under `model`, at temperature 1."""
        teacher = Teacher(model, layout=Layout.PADDED)
        sequences = [completion.sequence for completion in completions]
        starts = [len(completion.prompt_token_ids) for completion in completions]
        scores: Floats = torch.cat(list(teacher.logprobs(sequences, starts))).double().numpy()
        return scores

    def without(self, grouping: Grouping, groups: Sequence[str]) -> Any:
        """The new model with some groups left at their old values."""
        mixed = copy.deepcopy(self.new)
        old = self.old.state_dict()
        with torch.no_grad():
            for name, tensor in mixed.state_dict().items():
                if grouping(self._family, name) in groups:
                    tensor.copy_(old[name])
        return mixed

    def effects(
        self, grouping: Grouping, completions: Sequence[Completion], at_new: Floats
    ) -> dict[str, Floats]:
        """Δ that each group would leave behind if it alone had not arrived."""
        return {
            group: at_new - self.score(self.without(grouping, [group]), completions)
            for group in self.groups(grouping)
        }


def by_layer(family: Family, name: str) -> str:
    """`layer 3`, or the last module that owns a tensor outside the layers."""
    if (layer := family.layer_of(name)) is not None:
        return f"layer {layer}"
    return _owner(name)


def by_role(family: Family, name: str) -> str:
    """What a tensor does, in whichever layer: `norms`, or the name of its projection."""
    return "norms" if family.is_norm(name) else _owner(name)


def by_kind(family: Family, name: str) -> str:
    """`biases`, `norms` or `matrices`: what buckets, adapters and quantised loaders treat differently."""
    return "biases" if name.endswith(".bias") else "norms" if family.is_norm(name) else "matrices"


GROUPINGS: tuple[Grouping, ...] = (by_layer, by_role, by_kind)
"""What an update path forgets, it forgets by layer, by projection, or by kind of tensor."""


def _owner(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias").rsplit(".", maxsplit=1)[-1]


def perturbed(model: Any, seed: int, enough: Callable[[Any], bool] = lambda changed: True) -> Any:
    """A copy of `model` with every parameter moved by a known amount: the least that is `enough`, or the most."""
    for share in SHARES[:-1]:
        changed = _moved(model, seed, share)
        if enough(changed):
            return changed
    return _moved(model, seed, SHARES[-1])


def _moved(model: Any, seed: int, share: float) -> Any:
    changed, family = copy.deepcopy(model), family_of(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs()
            # A constant tensor (a fresh norm) has no spread; move it by its size, or that of the gain it stands for.
            size = (parameter + (family.norm_offset if family.is_norm(name) else 0)).abs().mean()
            spread = torch.where(spread > 0, spread, size)
            moved = parameter + share * spread * noise.to(parameter)
            # Through fp32, so that the checkpoint on disk and this copy are the same numbers.
            parameter.copy_(moved.float().to(parameter.dtype))
    return changed


def write_checkpoint(model: Any, like: Path, directory: Path) -> Path:
    """`model`'s weights in fp32 beside the configuration and tokenizer of the checkpoint `like`."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in like.iterdir():
        if file.is_file() and file.suffix not in {".safetensors"} and "index" not in file.name:
            shutil.copyfile(file, directory / file.name)
    tied = {name for name, _ in model.named_parameters()}
    state = {
        name: tensor.detach().float().contiguous()
        for name, tensor in model.state_dict().items()
        if name in tied
    }
    # Under the names that checkpoints have, which every engine reads: transformers stacks experts as it loads them.
    state = {name: each.contiguous() for name, each in revert_weight_conversion(model, state).items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory

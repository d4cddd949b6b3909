"""A known change to a checkpoint, so that what of it arrived and what did not can be told apart.

Every tensor is moved by noise of a fixed share of its own spread, to numbers that the checkpoint's own dtype can hold: an
engine that reads a bf16 checkpoint rounds what is sent in fp32, and would be off by the rounding of every weight.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from zerodrift.audit.update.weights import UpdatedWeights, beside
from zerodrift.core.errors import OutOfMemory
from zerodrift.core.memory import GIB, free_on_host, in_gib
from zerodrift.models.family.registry import family_of
from zerodrift.records.codec import write_atomically

SHARES = (0.02, 0.06, 0.2)
"""Noise in units of a tensor's own spread. The first moves logprobs by about 0.1 nat, a thousand times the fp32 floor;
in bf16, whose floor is 0.02 to 0.03 on built-in models, the others are needed."""
SHARD_BYTES = 2 * 2**30
"""Of a written checkpoint; an 8B in one file took 30 GiB while it was written."""
TOLD = GIB
"""Nobody plans for less."""
MARGIN = 1.1
"""A forward and its logits beside the weights."""


def perturbed(
    model: Any,
    seed: int,
    enough: Callable[[UpdatedWeights], bool] = lambda weights: True,
    saved: torch.dtype = torch.float32,
) -> UpdatedWeights:
    """`model` and a copy with every parameter moved by a known amount: the least that is `enough`, or the most.

    One copy, in which a larger amount takes the place of a smaller one; `saved` is the dtype of the checkpoint on disk.
    """
    weights = UpdatedWeights(model, beside(model))
    for share in SHARES:
        weights.bring(model)
        _move(weights.new, model, seed, share, saved)
        if share == SHARES[-1] or enough(weights):
            break
    weights.bring(model)
    return weights


@torch.no_grad()
def _move(changed: Any, model: Any, seed: int, share: float, saved: torch.dtype) -> None:
    """Every parameter of `changed` to that of `model`, moved by `share` of its spread, as `saved` can hold it."""
    family = family_of(model)
    # Drawn where the model is: on a host the noise of an 8B takes most of a minute.
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for (name, parameter), target in zip(model.named_parameters(), changed.parameters(), strict=True):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device=device)
        spread = parameter.std() if parameter.numel() > 1 else parameter.abs()
        # A constant tensor (a fresh norm) has no spread; move it by its size, or that of the gain it stands for.
        size = (parameter + (family.norm_offset if family.is_norm(name) else 0)).abs().mean()
        spread = torch.where(spread > 0, spread, size)
        moved = parameter + share * spread * noise.to(parameter)
        # So that the checkpoint on disk and this copy are the same numbers.
        target.copy_(moved.to(saved).to(parameter.dtype))


def check_room(model: Any) -> str:
    """What a second copy of `model` takes of what there is, in words, of a GiB and more; raises where it does not fit.

    Where an update did not arrive, what else it may have done is a third copy, one at a time: only the second is needed
    to say that it did.
    """
    needed = sum(each.numel() * each.element_size() for each in model.parameters())
    free = free_on_host()
    told = f"a weight update needs a second copy of the reference's weights, {in_gib(needed)} of the host's memory"
    if free is not None and free < needed * MARGIN:
        raise OutOfMemory(
            f"{told}, and {in_gib(free)} are free; compute the reference in less "
            "(--set validation.reference_dtype=bfloat16), or leave out --sync"
        )
    if needed < TOLD:
        return ""
    return told if free is None else f"{told}, where {in_gib(free)} are free"


def write_checkpoint(model: Any, like: Path, directory: Path, saved: torch.dtype = torch.float32) -> Path:
    """`model`'s weights in `saved` beside the configuration and tokenizer of the checkpoint `like`."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in like.iterdir():
        if file.is_file() and file.suffix not in {".safetensors"} and "index" not in file.name:
            shutil.copyfile(file, directory / file.name)
    tied = {name for name, _ in model.named_parameters()}
    state = {name: tensor.detach() for name, tensor in model.state_dict().items() if name in tied}
    # Under the names that checkpoints have, which every engine reads: transformers stacks experts as it loads them.
    _write(revert_weight_conversion(model, state), directory, saved)
    return directory


def _write(state: Mapping[str, torch.Tensor], directory: Path, saved: torch.dtype) -> None:
    """In files of a few GiB where there are many: what is written is copied first, a file at a time."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        size += saved.itemsize * tensor.numel()
        if size > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = saved.itemsize * tensor.numel()
        shards[-1].append(name)
    files = {
        "model.safetensors" if len(shards) == 1 else f"model-{n:05}-of-{len(shards):05}.safetensors": names
        for n, names in enumerate(shards, start=1)
    }
    for file, names in files.items():
        # On the host one by one: an accelerator has no room for a second copy.
        part = {name: state[name].to("cpu", saved).contiguous() for name in names}
        save_file(part, directory / file, metadata={"format": "pt"})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": saved.itemsize * sum(tensor.numel() for tensor in state.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        write_atomically(directory / "model.safetensors.index.json", msgspec.json.encode(index))

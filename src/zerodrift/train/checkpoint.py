"""Weights and optimizer of one step, whole or not at all: safetensors and JSON, never pickle.

checkpoints/step-000010/
    checkpoint.json       step, cursor, model, and the digest of the tensors
    training.safetensors  weights by name, and AdamW's moments as `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`
"""

import re
import shutil
from pathlib import Path

import msgspec
import torch
import xxhash
from safetensors.torch import load, save

from zerodrift.core.errors import CheckpointMismatch, RecordError
from zerodrift.core.version import WeightVersion
from zerodrift.records.archive.layout import flush_directory
from zerodrift.records.codec import write_atomically
from zerodrift.train.learner import Learner
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.listing import manifest_of

DIRECTORY, STATE, TENSORS = "checkpoints", "checkpoint.json", "training.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
KEPT = 2
"""Latest ones, beside the first, which a replay begins with."""
_NAME = re.compile(r"step-(\d{6,})")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands beside the tensors."""

    step: int
    """Steps that were done."""
    cursor: int
    """Groups that were consumed; noise is a function of a group's index, so there is no other random state."""
    weights: WeightVersion
    xxh3_128: str
    """Of the file of tensors."""


def write_checkpoint(root: Path, learner: Learner, step: int, cursor: int) -> None:
    """On the disk when this returns; older ones but the first are removed."""
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint_state(learner.model).items()}
    digest = manifest_of(tensors).digest
    for name, parameter in learner.parameters.items():
        moments = learner.optimizer.state.get(parameter, {})
        tensors |= {f"{moment}.{name}": moments[moment] for moment in MOMENTS if moment in moments}
    content = save(tensors)
    state = Checkpoint(
        step=step,
        cursor=cursor,
        weights=WeightVersion(f"step {step}", digest),
        xxh3_128=xxhash.xxh3_128_hexdigest(content),
    )
    folder = root / DIRECTORY
    folder.mkdir(parents=True, exist_ok=True)
    place, temporary = folder / f"step-{step:06}", folder / f".step-{step:06}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    write_atomically(temporary / TENSORS, content)
    write_atomically(temporary / STATE, msgspec.json.format(msgspec.json.encode(state)))
    shutil.rmtree(place, ignore_errors=True)
    temporary.rename(place)
    flush_directory(folder)
    for old in steps_of(root)[1:-KEPT]:
        shutil.rmtree(folder / f"step-{old:06}")


def steps_of(root: Path) -> list[int]:
    """Of the checkpoints that are there, in order."""
    folder = root / DIRECTORY
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_checkpoint(root: Path, learner: Learner, step: int) -> Checkpoint:
    """Put a checkpoint into model and optimizer; one of another model, or a damaged one, is refused and changes nothing."""
    folder = root / DIRECTORY / f"step-{step:06}"
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=Checkpoint)
        content = (folder / TENSORS).read_bytes()
    except (OSError, msgspec.MsgspecError) as error:
        raise RecordError(f"{folder} cannot be read as a checkpoint: {error}") from error
    if (found := xxhash.xxh3_128_hexdigest(content)) != state.xxh3_128:
        raise CheckpointMismatch(
            f"{folder / TENSORS} has digest {found}, and {state.xxh3_128} was written; it was damaged or exchanged"
        )
    tensors = load(content)
    _check_model(folder, learner, tensors)
    _put(learner, tensors)
    return state


def _check_model(folder: Path, learner: Learner, tensors: dict[str, torch.Tensor]) -> None:
    """Every tensor of the model is there in its form, and nothing else but moments."""
    wanted = checkpoint_state(learner.model)
    moments = {f"{moment}.{name}" for moment in MOMENTS for name in learner.parameters}
    wrong = sorted(
        (wanted.keys() - tensors.keys()) | (tensors.keys() - wanted.keys() - moments)
        or {
            name
            for name in wanted
            if (tensors[name].shape, tensors[name].dtype) != (wanted[name].shape, wanted[name].dtype)
        }
    )
    if wrong:
        raise CheckpointMismatch(
            f"{folder} is of another model: {', '.join(wrong[:4])} are missing, unknown or of another form"
        )


@torch.no_grad()
def _put(learner: Learner, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in checkpoint_state(learner.model).items():
        tensor.copy_(tensors[name])
    learner.optimizer.state.clear()
    for name, parameter in learner.parameters.items():
        if f"step.{name}" in tensors:
            learner.optimizer.state[parameter] = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS}

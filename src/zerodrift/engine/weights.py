"""Other weights for the same model, all or none: a complete set stands ready before one tensor is written.

No tensor moves: each keeps its address for the engine's life, and a staged set is copied into them between two steps.
Where the device fuses layers, q, k and v are joined in one tensor, as are gate and up, and parameters are views of it.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from zerodrift import models
from zerodrift.core import require
from zerodrift.core.errors import DigestMismatch, InvalidValue, ModelError, NonFinite
from zerodrift.core.version import WeightVersion
from zerodrift.exact.logprobs import head
from zerodrift.exact.lora import make_room
from zerodrift.exact.paged import PagedBatch, PagedKV, forward_paged
from zerodrift.exact.peft_model import of_peft
from zerodrift.exact.preparation import freeze_weights, layers_of, ops_of, prepare, refresh
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.listing import dtype_name, manifest_of, record_of
from zerodrift.weights.manifest import Manifest, TensorRecord

CANARY_TOKENS = 8
"""From all over the vocabulary: of embeddings that overflow in some rows alone, one token would see few."""


def own_model(model: Any, dtype: str | None) -> Any:
    """A prepared model that nobody else holds, so that no optimizer writes into tensors that a step reads."""
    if isinstance(model, (str, Path)):
        model = models.load(model, dtype=dtype or "float32")
    elif not isinstance(model, PreTrainedModel) and not of_peft(model):
        raise InvalidValue(
            f"a model is a {type(model).__name__}; give a directory, testbed:NAME, or a transformers model"
        )
    elif adapted := [path for path, module in model.named_modules() if of_peft(module)]:
        raise InvalidValue(
            f"{adapted[0] or 'the model'} has an adapter; an engine takes the base (model.unload() gives it back), and "
            "adapters by load_adapter(NAME, …)"
        )
    elif dtype is None:
        model = copy.deepcopy(model)
    else:
        raise InvalidValue(
            f"dtype is {dtype!r}, but the model is loaded already and has its own; leave it out"
        )
    model.zero_grad(set_to_none=True)
    model = prepare(model.eval().requires_grad_(requires_grad=False))
    if (layers := layers_of(model)) is not None:
        layers.join()
    return make_room(freeze_weights(model))


class StagedWeights:
    """A complete set of weights beside those that run, verified and tried: it can be swapped in at any time.

    Hold on to one, and its version can be swapped in again later.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], version: WeightVersion) -> None:
        """Made by `stage` and `RunningCopy.retained`."""
        self.version = version
        self._tensors = tensors

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By name, as a checkpoint has them; not to be written to."""
        return self._tensors

    def twin_of(self, model: Any) -> Any:
        """A second tree of modules as `model`, over these tensors; nothing is copied."""
        self.check_fits(model)
        return _twin(model, self._tensors)

    def check_fits(self, model: Any) -> None:
        """Tensor by tensor as `model` has them: those that were staged for it do, and for a replica of it."""
        if _shapes(self._tensors) != _shapes(checkpoint_state(model)):
            raise ModelError(
                f"weights {self.version.label!r} were staged for another model; stage them with this engine"
            )

    @torch.no_grad()
    def copy_into(self, model: Any) -> None:
        """Write every tensor where the model has it: nothing moves, so whatever was captured over it stays valid."""
        for name, tensor in checkpoint_state(model).items():
            tensor.copy_(self._tensors[name])
        # Tensors made under inference mode count no versions: nobody else would notice that they were written to.
        refresh(model)
        if model.device.type == "cuda":
            # Copies run on this thread's stream; what is copied from may be freed to another one as soon as this returns.
            torch.cuda.synchronize()


def stage(model: Any, state: Mapping[str, torch.Tensor], version: str | WeightVersion) -> StagedWeights:
    """The tensors of `state`, every one that a checkpoint has and nothing else, verified, and tried on a first token.

    `model` is not written to, and may run meanwhile.
    """
    _check_form(model, state)
    own = _copied(model, state)
    _check_numbers(model, state, own)
    return _tried(model, own, version)


class Staging:
    """Weights that come tensor by tensor, in any order, beside those that run."""

    def __init__(self, model: Any) -> None:
        """`model` is not written to, and may run meanwhile."""
        self._model = model
        self._places = checkpoint_state(model)
        self._tensors: dict[str, torch.Tensor] = {}
        self._records: dict[str, TensorRecord] = {}

    @torch.no_grad()
    def put(self, record: TensorRecord, tensor: torch.Tensor) -> None:
        """A copy of `tensor`, which holds the very bits of `record`; else refused, and may come again."""
        name, place = record.name, self._places[record.name]
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            raise ModelError(f"the new {name} is no tensor with numbers; materialise or densify it first")
        if tuple(tensor.shape) != record.shape or dtype_name(tensor.dtype) != record.dtype:
            raise ModelError(
                f"the new {name} is {list(tensor.shape)} of {dtype_name(tensor.dtype)}, but the manifest says {record.form}"
            )
        copied = torch.empty_like(place).copy_(tensor)
        # Of the copy: a trainer may write to its own tensors at any time.
        found = record_of(name, copied)
        if found != record:
            raise DigestMismatch(
                f"the new {name} has xxh3_128 {found.xxh3_128}, and the manifest says {record.xxh3_128}; it was damaged "
                "or mixed up on the way: send it again"
            )
        self._tensors[name], self._records[name] = copied, record

    def drop(self) -> None:
        """Let go of what came."""
        self._tensors.clear()

    def finish(self, label: str) -> StagedWeights:
        """All that came, tried on the canary: finite one by one, and together."""
        own = {name: self._tensors[name] for name in self._places}
        _check_finite(own)
        try_out(_twin(self._model, own))
        records = tuple(self._records[name] for name in sorted(self._records))
        return StagedWeights(own, WeightVersion(label, Manifest(records).digest))


class RunningCopy(NamedTuple):
    """The weights that ran between two steps. Only the copy has to be taken there."""

    model: Any
    tensors: Mapping[str, torch.Tensor]
    version: WeightVersion

    def retained(self) -> StagedWeights:
        """Digested and tried while steps may go on."""
        return _tried(self.model, self.tensors, self.version)


def copy_running(model: Any, version: WeightVersion) -> RunningCopy:
    """A copy of the weights that run."""
    return RunningCopy(model, _copied(model, checkpoint_state(model)), version)


@torch.no_grad()
def _copied(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty_like(tensor).copy_(state[name]) for name, tensor in checkpoint_state(model).items()
    }


def _tried(model: Any, own: Mapping[str, torch.Tensor], version: str | WeightVersion) -> StagedWeights:
    new = version_of(own, version)
    try_out(_twin(model, own))
    return StagedWeights(own, new)


def _twin(model: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A second tree of modules over `tensors`, of which nothing is copied."""
    ops = ops_of(model)
    # What is in the memo is not copied: parameters are given their new tensors, and the ops, which others use, are shared.
    memo: dict[int, Any] = {id(ops): ops}
    for name, tensor in checkpoint_state(model, keep_vars=True).items():
        parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = (
            torch.nn.Parameter(tensors[name], requires_grad=False) if parameter else tensors[name]
        )
    return freeze_weights(copy.deepcopy(model, memo))


def version_of(state: Mapping[str, torch.Tensor], version: str | WeightVersion) -> WeightVersion:
    """The version with the digest of the tensors themselves; a digest that was promised must be that one."""
    require.instance(InvalidValue, "version", version, str | WeightVersion)
    digest = manifest_of(state).digest
    if isinstance(version, str):
        return WeightVersion(version, digest)
    if version.digest not in (None, digest):
        raise DigestMismatch(
            f"weights {version.label!r} should have digest {version.digest}, but have {digest}; they were damaged or "
            "mixed up on the way: send them again"
        )
    return WeightVersion(version.label, digest)


def _check_form(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    if not isinstance(state, Mapping) or not all(isinstance(each, torch.Tensor) for each in state.values()):
        raise ModelError("the new weights are no mapping from names to tensors; give model.state_dict()")
    if meta := [name for name, tensor in state.items() if tensor.is_meta]:
        raise ModelError(f"the new {meta[0]} is a meta tensor, which has no numbers; materialise it first")
    needed, known = checkpoint_state(model), model.state_dict()
    for what, names in (
        ("lack", needed.keys() - state.keys()),
        ("have unknown", state.keys() - known.keys()),
    ):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise ModelError(f"the new weights {what} {shown}; give the model's whole state dict")
    for name, tensor in state.items():
        if tensor.shape != known[name].shape or tensor.dtype != known[name].dtype:
            raise ModelError(
                f"the new {name} is {list(tensor.shape)} of {tensor.dtype}, but the model has "
                f"{list(known[name].shape)} of {known[name].dtype}"
            )


@torch.no_grad()
def _check_numbers(model: Any, state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Of the copy that will run: a trainer may write to its own tensors at any time."""
    _check_finite(own)
    known = model.state_dict()
    for name in state.keys() - own.keys():
        # Names that share memory with another: giving both is fine as long as they say the same.
        for twin in (each for each in own if known[each].data_ptr() == known[name].data_ptr()):
            given, copied = state[name], own[twin]
            one_memory = given.data_ptr() == state[twin].data_ptr()
            if not one_memory and not torch.equal(given.to(copied.device), copied):
                raise ModelError(
                    f"the new {name} differs from the tensor that it is tied to; untie the model first"
                )


@torch.no_grad()
def _check_finite(own: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in own.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NonFinite(f"the new {name} holds NaN or an infinity; the old weights stay in place")


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


@torch.no_grad()
def try_out(model: Any) -> None:
    """A few tokens through the new model: weights that are finite one by one may still overflow together."""
    places_T = torch.arange(CANARY_TOKENS, device=model.device)
    tokens_T = places_T * (model.config.vocab_size // CANARY_TOKENS)
    batch = PagedBatch(tokens_T, places_T, places_T, (0, CANARY_TOKENS), (0,), (places_T[:1],))
    logits_TV = head(model, forward_paged(model, batch, PagedKV(model, 1, CANARY_TOKENS)))
    if not bool(torch.isfinite(logits_TV).all()):
        raise NonFinite(
            "a few tokens through the new weights give non-finite logits; the old ones stay in place"
        )

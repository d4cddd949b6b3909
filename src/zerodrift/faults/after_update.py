"""Faults that no checkpoint shows: the update arrives whole, and what hangs on it is left behind.

They live in the engine after `load_weights`: the other end of a tie, a table beside the parameters, another replica. Or
what answers is another model from the start.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from zerodrift.backends.base import Backend
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.damage import damaged
from zerodrift.faults.delivery import Claiming
from zerodrift.faults.wrapper import FaultyBackend, Plant, clone, the_reference
from zerodrift.models.family.parts import ModelParts

Item = TypeVar("Item")
Out = TypeVar("Out")
Serve = Callable[[Sequence[Item]], list[Out]]

REPLICAS = 8
_STALE_REPLICA = 3


class AfterUpdate(FaultyBackend):
    """Every update leaves the new model changed; `change` gets the model from before and the one from after."""

    inside = True

    def __init__(self, engine: Backend, change: Callable[[Any, Any], None]) -> None:
        super().__init__(clone(engine))
        self._change = change

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """The version's digest was taken before the change, and so does not show it."""
        before = the_reference(self.inner).model
        self.inner.load_weights(directory, version)
        self._change(before, the_reference(self.inner).model)


class Fleet(FaultyBackend):
    """Eight replicas behind one address, served in turn; one of them keeps the weights it started with."""

    def __init__(self, engine: Backend) -> None:
        """Replicas with equal weights are one engine here."""
        super().__init__(engine)
        self._forgotten = clone(engine)
        self._turn = 0

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Each request goes to the next replica."""
        return self._in_turn(requests, self.inner.generate, self._forgotten.generate)

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        """As `generate`: each replica streams by itself."""
        return self._in_turn(requests, self.inner.stream, self._forgotten.stream)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Each sequence goes to the next replica."""
        return self._in_turn(sequences, self.inner.score, self._forgotten.score)

    def _in_turn(
        self, items: Sequence[Item], updated: Serve[Item, Out], forgotten: Serve[Item, Out]
    ) -> list[Out]:
        turns = [(self._turn + place) % REPLICAS == _STALE_REPLICA for place in range(len(items))]
        self._turn += len(items)
        results = {
            old: iter(serve([item for item, turn in zip(items, turns, strict=True) if turn is old]))
            for old, serve in ((False, updated), (True, forgotten))
        }
        return [next(results[old]) for old in turns]


class StaleReplica(Claiming):
    """All replicas claim the version that seven of them run."""

    def __init__(self, engine: Backend) -> None:
        super().__init__(Fleet(engine))

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """Seven of eight get it."""
        self.inner.load_weights(directory, version)
        self._claim(directory, version)


def _untied(before: Any, after: Any) -> None:
    """The head stays what it was; the embedding is new."""
    weight = before.get_output_embeddings().weight.detach().clone()
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    head.weight = nn.Parameter(weight, requires_grad=False)
    after.set_output_embeddings(head)


def _rotary_table(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], None]:
    def damage(_: Any, after: Any) -> None:
        for module, name in list(ModelParts(after).frequencies()):
            setattr(module, name, change(getattr(module, name)))

    return damage


def _drawn_anew(model: Any) -> None:
    """Every tensor keeps its values and loses their order, so that nothing but the function is another."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            order = torch.randperm(parameter.numel(), generator=generator)
            parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))


def _through_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


AFTER_UPDATE_FAULTS: Mapping[str, Plant] = {
    "weights/other-model:another-seed": damaged(_drawn_anew),
    "weights/tied-head:head-left": lambda engine: AfterUpdate(engine, _untied),
    "weights/buffer:rotary-bf16": lambda engine: AfterUpdate(engine, _rotary_table(_through_bf16)),
    "weights/buffer:rotary-zero": lambda engine: AfterUpdate(engine, _rotary_table(torch.zeros_like)),
    "weights/replica:one-of-eight": StaleReplica,
}

"""Bugs on the way of new weights to the engine: what the trainer sent is not what the engine loaded."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from history.bug import reenacted
from history.twin import Reloading, Twin
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion
from zerodrift.faults.wrapper import clone

Bucket = dict[str, torch.Tensor]


class WakesWithItsBackup(Twin):
    """Weights are written into an engine that sleeps, and waking restores what it had when it fell asleep."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._backup = self.reference.model

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        self.run(self._backup)
        return super().generate(requests)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.run(self._backup)
        return super().score(sequences)


class BaseLayersOnly(Reloading):
    """What is sent is the frozen base under the names that a model with adapters has; the adapter is skipped."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, self._load)
        self._base = _copied(self.reference.model)

    def _load(self, _: Any, after: Any) -> None:
        # All that was learnt is in tensors called lora_A and lora_B: W + BA arrives as W.
        payload = {f"{name}.base_layer": tensor for name, tensor in self._base.items() if "lora_" not in name}
        into = dict(after.named_parameters())
        for name, tensor in payload.items():
            into[name.removesuffix(".base_layer")].data.copy_(tensor)


class ClonedHead(Reloading):
    """Patches go into a cache of tensors in which the tied head was cloned, and no patch is called lm_head."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, self._patch)
        self._cache = _copied(self.reference.model)
        self._cache["lm_head.weight"] = self._cache["model.embed_tokens.weight"].clone()

    def _patch(self, _: Any, after: Any) -> None:
        self._cache |= _copied(after)
        weight_VH = self._cache["lm_head.weight"]
        head = nn.Linear(weight_VH.shape[1], weight_VH.shape[0], bias=False)
        head.weight = nn.Parameter(weight_VH, requires_grad=False)
        after.set_output_embeddings(head)


class OneReplicaMissed(Twin):
    """Three replicas with sticky routing, of which the last is not in the group that is updated."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._missed = clone(engine)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        updated = super().generate(requests)
        missed = self._missed.generate(requests)
        return [
            _under(self.reference.version, old) if _routed_to_last(request.prompt.token_ids) else new
            for request, old, new in zip(requests, missed, updated, strict=True)
        ]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        both = zip(sequences, self._missed.score(sequences), super().score(sequences), strict=True)
        return [old if _routed_to_last(ids) else new for ids, old, new in both]


def _routed_to_last(ids: Sequence[int]) -> bool:
    return sum(ids) % 3 == 2


def _under(version: WeightVersion, answer: Answer) -> Answer:
    """The controller knows one version for the whole fleet."""
    return msgspec.structs.replace(
        answer,
        completions=tuple(
            msgspec.structs.replace(
                each,
                versions=(VersionSpan(version, 0, len(each.token_ids)),),
                lineage=(LineageSegment(version, 0, len(each.sequence) - 1),),
            )
            for each in answer.completions
        ),
    )


def _copied(model: Any) -> Bucket:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _buckets(model: Any) -> Iterator[Bucket]:
    """One for each layer, by the names inside the layer."""
    for layer in model.model.layers:
        yield dict(layer.named_parameters())


def _buffers_not_sent(before: Any, after: Any) -> None:
    """The trainer holds biases as buffers, and what it sends are `named_parameters`."""
    old = dict(before.named_parameters())
    for name, parameter in after.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(old[name])


def _vectors_in_bf16(_: Any, after: Any) -> None:
    for parameter in after.parameters():
        if parameter.dim() == 1:
            parameter.data.copy_(parameter.to(torch.bfloat16))


def _views_of_one_buffer(_: Any, after: Any) -> None:
    """A layer is loaded when the next one has been received, into the buffer that its tensors are views of."""
    sent = [
        {name: parameter.detach().clone() for name, parameter in bucket.items()} for bucket in _buckets(after)
    ]
    buffer = torch.empty(sum(tensor.numel() for tensor in sent[0].values()))
    pending: list[tuple[Bucket, Bucket]] = []
    for place, payload in zip(_buckets(after), sent, strict=True):
        views, begin = {}, 0
        for name, tensor in payload.items():
            views[name] = buffer[begin : begin + tensor.numel()].view(tensor.shape)
            views[name].copy_(tensor)
            begin += tensor.numel()
        pending.append((place, views))
        if len(pending) == 2:
            _load(*pending.pop(0))
    _load(*pending.pop())


def _load(place: Bucket, tensors: Bucket) -> None:
    for name, tensor in tensors.items():
        place[name].data.copy_(tensor)


def _sent_too_early(before: Any, after: Any) -> None:
    """The last quarter of each bucket is still being written when it is sent: there lie the bytes of last time."""
    for old, new in zip(_buckets(before), _buckets(after), strict=True):
        total = sum(tensor.numel() for tensor in new.values())
        begin = 0
        for name, tensor in new.items():
            late = max(0, begin + tensor.numel() - total * 3 // 4)
            if late:
                tensor.data.view(-1)[-late:] = old[name].detach().view(-1)[-late:]
            begin += tensor.numel()


MARKER = bytes([0xAB, 0xDC, 0xEF, 0x88])


def _marker_in_the_data(_: Any, after: Any) -> None:
    """Four bytes are two numbers of a bf16 payload, whose first tensor is the embedding."""
    overwritten = torch.frombuffer(bytearray(MARKER), dtype=torch.bfloat16)
    after.model.embed_tokens.weight.data.view(-1)[:2] = overwritten.float()


def _reload(reload: Any) -> Any:
    return lambda engine: Reloading(engine, reload)


DELIVERY = (
    reenacted("trl#5312", WakesWithItsBackup),
    reenacted("verl#7495", BaseLayersOnly),
    reenacted("verl#5688", _reload(_buffers_not_sent)),
    reenacted("verl#7139", _reload(_views_of_one_buffer)),
    reenacted("verl#7083", _reload(_sent_too_early)),
    reenacted("verl#6813", _reload(_marker_in_the_data)),
    reenacted("prime-rl#2823", ClonedHead),
    reenacted("NeMo-RL#3540", _reload(_vectors_in_bf16)),
    reenacted("vllm#52689", OneReplicaMissed),
)

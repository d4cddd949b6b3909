"""Weights by torch.distributed: rank 0 trains and sends, every other rank has an engine.

    trainer    manifest →          tensors →           decision →
    engines              ← votes              ← votes              ← votes

Votes go to everybody, so that all see alike whether an update goes on. An engine that loses the others before it voted for
what it has on its disk is as before; afterwards it asks `Decisions`, as it does when it starts again. Bytes travel as they
are: no pickle. The group must be one of gloo, with a timeout that the caller chose.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerodrift.core.errors import EngineError, EngineUnreachable, OutOfOrder, ZerodriftError
from zerodrift.engine.updates import Updates, WeightUpdate
from zerodrift.sync.decisions import Decisions
from zerodrift.weights.session import Stage
from zerodrift.weights.update import UpdateManifest, decode_update, encode_update

TRAINER = 0
MOST_WORDS = 400
"""Bytes of what a rank says about its refusal."""


class _Order(IntEnum):
    STOP = 0
    UPDATE = 1
    PUBLISH = 2
    ABORT = 3


class _Group(NamedTuple):
    """Messages in one group; what torch raises when a rank is lost becomes an error of ours."""

    group: Any

    def order(self, order: int, nbytes: int = 0) -> tuple[int, int]:
        """From the trainer to all: what comes next, and how long it is."""
        message = torch.tensor([order, nbytes], dtype=torch.int64)
        self._call(dist.broadcast, message)
        return int(message[0]), int(message[1])

    def send(self, content: torch.Tensor) -> torch.Tensor:
        """These bytes, from the trainer to all."""
        self._call(dist.broadcast, content)
        return content

    def vote(self, refusal: str = "") -> None:
        """Everybody says whether it goes on; one that does not ends it for all."""
        words = refusal.encode()[:MOST_WORDS]
        own = torch.zeros(MOST_WORDS + 1, dtype=torch.uint8)
        own[0] = len(refusal) > 0
        own[1 : len(words) + 1] = torch.tensor(list(words), dtype=torch.uint8)
        votes = [torch.zeros_like(own) for _ in range(dist.get_world_size(self.group))]
        try:
            dist.all_gather(votes, own, group=self.group)
        except RuntimeError as error:
            raise _lost(error) from error
        for rank, each in enumerate(votes):
            if each[0]:
                said = bytes(each[1:].tolist()).rstrip(b"\0").decode(errors="replace")
                raise EngineError(f"rank {rank} refused the update: {said}")

    def _call(self, function: Any, tensor: torch.Tensor) -> None:
        try:
            function(tensor, src=TRAINER, group=self.group)
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: RuntimeError) -> EngineUnreachable:
    return EngineUnreachable(
        f"a rank was lost in the middle of an update ({str(error).partition(chr(10))[0][:200]}); start the group anew"
    )


class GlooPeers:
    """All engines of a group, as one target of a publisher: they serve an update together or not at all."""

    goes_back = False
    """A decision is final: whoever is lost after it makes the update when it starts again."""

    def __init__(self, group: Any, *, name: str = "gloo") -> None:
        """Called by rank 0 of `group`; the others are in `serve_gloo`."""
        if dist.get_rank(group) != TRAINER:
            raise OutOfOrder(f"rank {dist.get_rank(group)} is an engine's; call serve_gloo there")
        self.name, self._group = name, _Group(group)
        self._waiting = False

    def prepare(self, update: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """On the disk of every engine when this returns."""
        content = torch.frombuffer(bytearray(encode_update(update)), dtype=torch.uint8)
        self._group.order(_Order.UPDATE, len(content))
        self._group.send(content)
        self._group.vote()
        for record in update.weights.tensors:
            self._group.send(_as_bytes(tensors[record.name]))
        self._group.vote()
        self._waiting = True

    def publish(self) -> None:
        """They were told that it is decided; an error says who did not answer, and not that it does not hold."""
        self._waiting = False
        self._group.order(_Order.PUBLISH)
        self._group.vote()

    def abort(self) -> None:
        """Where they wait for a decision."""
        if self._waiting:
            self._waiting = False
            self._group.order(_Order.ABORT)

    def roll_back(self) -> None:
        """A decision is final."""
        raise OutOfOrder(
            f"{self.name} made what was decided; publish the weights of the version before as an update"
        )

    def stop(self) -> None:
        """Let every engine leave `serve_gloo`."""
        self._group.order(_Order.STOP)


def serve_gloo(updates: Updates, group: Any, decisions: Decisions, *, kv: str = "recompute") -> None:
    """Take updates from rank 0 of `group` until it stops; called by every rank that has an engine."""
    peer = _Group(group)
    while True:
        order, nbytes = peer.order(_Order.STOP)
        if order == _Order.STOP:
            return
        if order != _Order.UPDATE:
            raise OutOfOrder(f"order {order} came, and no update was under way")
        try:
            _take(peer, nbytes, updates, decisions, kv)
        except EngineUnreachable:
            raise
        except EngineError:
            # Somebody refused it, here or elsewhere, and every rank heard so.
            continue


def _take(peer: _Group, nbytes: int, updates: Updates, decisions: Decisions, kv: str) -> None:
    content = bytes(peer.send(torch.empty(nbytes, dtype=torch.uint8)).tolist())
    update: UpdateManifest | None = None
    under_way: WeightUpdate | None = None
    refusal = ""
    try:
        update = decode_update(content, "the manifest that rank 0 sent")
        under_way = updates.begin(update, updates.current)
    except ZerodriftError as error:
        refusal = f"[{error.code}] {error}"
    try:
        peer.vote(refusal)
        assert update is not None, "a refusal ends the vote"
        assert under_way is not None, "a refusal ends the vote"
        peer.vote(_received(peer, update, under_way))
    except BaseException:
        _end(under_way)
        raise
    if _decided(peer, update, decisions):
        under_way.publish(kv)
        peer.vote()
    else:
        _end(under_way)


def _received(peer: _Group, update: UpdateManifest, under_way: WeightUpdate) -> str:
    """Every tensor, and what is wrong with the first that is refused: the others come all the same."""
    refusal = ""
    for record in update.weights.tensors:
        content = peer.send(torch.empty(record.nbytes, dtype=torch.uint8))
        if refusal:
            continue
        try:
            under_way.push(record.name, content.view(getattr(torch, record.dtype)).reshape(record.shape))
        except ZerodriftError as error:
            refusal = f"[{error.code}] {error}"
    if refusal:
        return refusal
    try:
        under_way.verify()
        under_way.commit()
    except ZerodriftError as error:
        return f"[{error.code}] {error}"
    return ""


def _decided(peer: _Group, update: UpdateManifest, decisions: Decisions) -> bool:
    """By the trainer's word; where it is lost, by what it wrote, or else not: nobody can write otherwise after that."""
    try:
        order, _ = peer.order(_Order.STOP)
    except EngineUnreachable:
        return decisions.decide(update.identity, made=False)
    return order == _Order.PUBLISH


def _end(under_way: WeightUpdate | None) -> None:
    if under_way is not None and under_way.stage not in (Stage.ABORTED, Stage.PUBLISHED):
        under_way.abort()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

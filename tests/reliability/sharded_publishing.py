"""One of two trainer processes that share a model by FSDP2: `sharded_publishing.py STORE DIRECTORY RANK`.

Both train a step and publish, three times; the second time under a label that was used. Rank 0 has the engine, and takes
receipts. Prints as JSON what each saw.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zerodrift import models
from zerodrift.backends.exact import ExactBackend
from zerodrift.core.errors import InvalidValue, VersionConflict, ZerodriftError
from zerodrift.engine.engine import Engine
from zerodrift.engine.weights import StagedWeights
from zerodrift.sync.canary import random_canary
from zerodrift.sync.key import create_key
from zerodrift.sync.ledger import ReceiptLedger
from zerodrift.sync.publisher import WeightPublisher
from zerodrift.sync.take import ReceiptTaker
from zerodrift.weights.listing import manifest_of
from zerodrift.weights.update import UpdateManifest

LABELS = ("step 1", "step 1", "step 3")


class Direct:
    """An engine without a loop, which answers canaries itself."""

    name, goes_back = "0", True

    def __init__(self, engine: Engine) -> None:
        self.engine, self.staged = engine, list[StagedWeights]()

    def prepare(self, update: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        if any(staged.version.label == update.version for staged in self.staged):
            raise VersionConflict(f"{update.version!r} was served before")
        self.staged.append(self.engine.stage_weights(tensors, update.weight_version))

    def publish(self) -> None:
        self.engine.swap_weights(self.staged[-1])

    def abort(self) -> None:
        """Nothing serves yet."""

    def roll_back(self) -> None:
        self.engine.swap_weights(self.staged[-2])


def trained(model: Any, optimizer: Any, rank: int) -> str:
    """A step on other tokens at each rank; the digest of what all ranks then have together."""
    optimizer.zero_grad()
    ids = torch.tensor(random_canary(512, 64, seed=rank).sequences)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return manifest_of({name: each.full_tensor() for name, each in model.named_parameters()}).digest


def main() -> None:
    torch.set_num_threads(1)
    store, directory, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model, targets, takers = models.load("testbed:qwen3"), list[Any](), list[ReceiptTaker]()
    if rank == 0:
        backend = ExactBackend("testbed:qwen3")
        targets = [Direct(backend.engine)]
        ledger = ReceiptLedger(directory / "receipts", create_key(directory / "key"))
        takers = [ReceiptTaker(backend, random_canary(512, 320, avoid=range(4)), ledger)]
        takers[0].start(model, "step 0")
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    seen: dict[str, Any] = {"digests": [], "serves": [], "refused": [], "receipts": [], "targets": None}
    try:
        WeightPublisher(model, [Direct(None)] if rank else [])  # type: ignore[arg-type]
    except InvalidValue as error:
        seen["targets"] = str(error)
    publisher = WeightPublisher(model, targets, takers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for label in LABELS:
        seen["digests"].append(trained(model, optimizer, rank))
        try:
            seen["receipts"] += [str(receipt.arrival) for receipt in publisher.publish(label)]
        except ZerodriftError as error:
            seen["refused"].append(str(error))
        seen["serves"] += [[each.engine.version.label, each.engine.version.digest] for each in targets]
    sys.stdout.write(json.dumps(seen))
    sys.stdout.flush()
    # A rank that left while the other was still inside was ended by C++ once ("terminate called without an active exception"),
    # and threads of gloo can outlive the interpreter: all is said, so neither is waited for.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()

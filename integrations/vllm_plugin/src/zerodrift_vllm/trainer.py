"""The trainer's side, driven by vLLM's own `WeightTransferTrainerFactory`: write a directory, have the server read it.

Every rank iterates the source, since to gather a sharded parameter takes all of them; rank 0 writes what it gets and talks
to the server. The update is on disk and as its source declared it before the server hears of it, and is removed when the
server has it or has refused it.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from zerodrift_vllm import NAME
from zerodrift_vllm.checkpoint import INDEX

SHARD_BYTES = 2 * 2**30
"""Held in memory at a time."""


@dataclass
class DirectoryTrainerInitInfo(TrainerInitInfo):
    """What `WeightTransferTrainerFactory.trainer_init` is given; `rank` is this trainer process's."""

    backend: ClassVar[str] = NAME
    exchange: str
    """A directory that trainer and server both see; each update gets a folder in it for as long as it takes."""
    checkpoint: str | None = None
    """Directory with the tensors that the model is made of, where it is served by a name; None: the one that is served."""


class DirectoryTrainer(TrainerWeightTransferEngine[DirectoryTrainerInitInfo]):
    """Sends the whole of its source, each round."""

    init_info_cls = DirectoryTrainerInitInfo

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, exchange: Path, is_sender: bool
    ) -> None:
        """Made by `trainer_init`."""
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._source, self._exchange, self._rounds = source, exchange, 0

    @classmethod
    def trainer_init(
        cls,
        init_info: DirectoryTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> "DirectoryTrainer":
        """On every rank; the sender tells the server where the tensors of its model are listed."""
        if source is None:
            raise ValueError("there is nothing to send; give source=ModuleSource(model)")
        exchange = Path(init_info.exchange)
        if init_info.is_sender:
            if not exchange.is_dir():
                raise ValueError(
                    f"exchange={init_info.exchange} is no directory; make one that the server sees too"
                )
            named = {} if init_info.checkpoint is None else {"checkpoint": init_info.checkpoint}
            client.init_weight_transfer_engine(named)
        return cls(client=client, source=source, exchange=exchange, is_sender=init_info.is_sender)

    def send_weights(self, weight_version: str | None = None) -> None:
        """One update, on every rank; `round-N` where no version is given. The server publishes it after it has all."""
        self._rounds += 1
        if not self.is_sender:
            for _ in self._source:
                pass
            return
        directory = Path(tempfile.mkdtemp(prefix="update-", dir=self._exchange))
        try:
            _write(directory, self._declared())
            self.client.start_weight_update()
            self.client.update_weights({"directory": str(directory)})
            self.client.finish_weight_update(weight_version or f"round-{self._rounds}")
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _declared(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the source yields, which must be what it says that it has: names, dtypes and shapes, in that order.

        All of it is taken even where something is wrong: the other ranks gather along.
        """
        declared, found = self._source.metadata(), list[ParamMeta]()
        for name, tensor in self._source:
            found.append(ParamMeta(name, tensor.dtype, tuple(tensor.shape)))
            yield name, tensor
        if found != declared:
            wrong = next((each for each in found if each not in declared), None) or next(
                (each for each in declared if each not in found), declared[:1]
            )
            raise ValueError(
                f"the source yields other parameters than it declares, such as {wrong}; nothing was sent"
            )


def _write(directory: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Shards and their index."""
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    held = 0

    def flush() -> None:
        nonlocal shard, held
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard, held = {}, 0

    for name, tensor in tensors:
        if name in places or name in shard:
            raise ValueError(f"the source yields {name} twice; nothing was sent")
        if shard and held + tensor.nbytes > SHARD_BYTES:
            flush()
        # A copy: a source may gather the next parameter into the same memory, or yield views of one.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += tensor.nbytes
    if shard:
        flush()
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))

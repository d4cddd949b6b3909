"""The ranks over which FSDP2 has sharded a trainer's model: all of them gather, the first of them sends.

What becomes of an update is known to the sender alone, and ranks that do not know it would go on to the next collective and
wait there: so all are told.
"""

from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """Those that share one model; one that is not sharded has a single rank."""

    def __init__(self, model: Any) -> None:
        """Every rank makes its own."""
        shards = _shards(model)
        if not shards and hasattr(model, "reshard"):
            # What a forward has gathered and left so does not say among whom.
            model.reshard()
            shards = _shards(model)
        mesh = shards[0].device_mesh if shards else None
        self._groups = [] if mesh is None else list(mesh.get_all_groups())
        self._device = shards[0].device if shards else torch.device("cpu")
        self.first = 0 if mesh is None else int(mesh.mesh.flatten()[0])
        self.rank = self.first if mesh is None else dist.get_rank()
        self.size = 1 if mesh is None else mesh.size()

    @property
    def sends(self) -> bool:
        """Whether this one talks to engines."""
        return self.rank == self.first

    def any(self, here: bool) -> bool:  # noqa: FBT001  the one thing that is told
        """Whether it is so on any of them. All call this together."""
        told = torch.tensor([int(here)], device=self._device)
        for group in self._groups:
            dist.all_reduce(told, dist.ReduceOp.MAX, group)
        return bool(told.item())


def _shards(model: Any) -> list[Any]:
    return [each for each in model.parameters() if hasattr(each, "device_mesh")]

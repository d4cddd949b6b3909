"""Inside each worker of a vLLM (`--worker-extension-cls deaf_rank.DeafRank`): one rank that takes no update, from the next on."""

from typing import Any


class DeafRank:
    """vLLM mixes it into its worker; `/collective_rpc` calls it on all ranks."""

    rank: int
    weight_transfer_engine: Any

    def deafen(self, rank: int | None) -> int:
        """That rank answers as ever and keeps its weights; all take updates again where it is None."""
        own = vars(self.weight_transfer_engine)
        if self.rank == rank:
            own["finish_weight_update"] = lambda: None
        else:
            own.pop("finish_weight_update", None)
        return self.rank

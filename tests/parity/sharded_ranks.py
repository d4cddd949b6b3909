"""One of the two processes of `test_exact_fsdp.py`: scores, trains a step, scores again, and prints what differed as JSON.

Arguments: a file for the processes to meet at, and this one's rank.
"""

import copy
import json
import sys
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zerodrift import exact, models
from zerodrift.core.completion import LogprobKind
from zerodrift.core.errors import InvalidPrompt
from zerodrift.core.request import SamplingParams


class Done(NamedTuple):
    """A completion."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    kind: LogprobKind = LogprobKind.RAW
    sampling: SamplingParams = SamplingParams(max_tokens=30, temperature=0.8)


def ids(seed: int, length: int) -> tuple[int, ...]:
    return tuple(5 + (seed + at * 37) % 400 for at in range(length))


# Different lengths on the ranks: nothing of one may wait for as many of the other.
OF_RANK = (
    [Done(ids(1, 4), ids(2, 25)), Done(ids(3, 66), ids(4, 3), LogprobKind.PROCESSED)],
    [Done(ids(5, 1), ids(6, 30), LogprobKind.PROCESSED), Done(ids(7, 2), ())],
)
ABORTED = [Done(ids(8, 3), ())]


def differing(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    assert [len(part) for part in a] == [len(part) for part in b]
    return int((torch.cat(a).view(torch.int32) != torch.cat(b).view(torch.int32)).sum())


def loss_of(scored: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(scored).square().sum()


def furthest_gradient(model: Any, whole: Any) -> float:
    """From the mean over both ranks of what the whole model gives, which is what FSDP2 takes."""
    for mine in OF_RANK:
        (loss_of(exact.token_logprobs(whole, mine)) / len(OF_RANK)).backward()
    expected = dict(whole.named_parameters())
    return max(
        float((value.grad.full_tensor() - expected[name].grad).abs().max() / expected[name].grad.abs().max())
        for name, value in model.named_parameters()
    )


def main() -> None:
    """Both ranks run all of it: each call gathers weights from the other."""
    torch.set_num_threads(1)
    rank = int(sys.argv[2])
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
    mesh, mine = init_device_mesh("cpu", (2,)), OF_RANK[rank]
    whole = exact.prepare(models.load("testbed:qwen3"))
    model = copy.deepcopy(whole)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before, expected = (exact.token_logprobs(each, mine) for each in (model, whole))
    loss_of(before).backward()
    found = {"before": differing(before, expected)}
    furthest = furthest_gradient(model, whole)
    optimizer.step()
    # A rank whose samples were all refused takes part all the same, backward too.
    nobody = rank == 1
    few = exact.token_logprobs(model, ABORTED if nobody else mine)
    loss_of(few).backward()
    whole.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    with torch.no_grad():
        found["nothing"] = differing(few, exact.token_logprobs(whole, ABORTED if nobody else mine))
        after, moved = exact.token_logprobs(model, mine), exact.token_logprobs(whole, mine)
        found["after"] = differing(after, moved)
    try:
        exact.token_logprobs(model, [] if nobody else mine)
        refused = ""
    except InvalidPrompt as error:
        refused = error.code
    told = {
        "refused": refused,
        "differing": found,
        "rows": sum(map(len, before)),
        "moved": differing(before, after),
        "furthest gradient": furthest,
    }
    dist.barrier()
    dist.destroy_process_group()
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    # FSDP2 tells everybody whose model returns a view; nothing here writes into it.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    main()

"""FSDP2 around a prepared model, one process on gloo: the same bits, or refused with what to do."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zerodrift import exact, models
from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.errors import UnsupportedModel
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.exact.verification import alone, differing_rows

IDS = [5 + number * 37 % 400 for number in range(70)]
# FSDP2 tells everybody whose model returns a view; nothing here writes into it.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def whole() -> Any:
    return exact.prepare(models.load("testbed:qwen3"))


def sharded(model: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> Any:
    """As trainers do it: every layer, then the rest."""
    model = copy.deepcopy(model)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


def logits_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    return found


@torch.no_grad()
def expected_of(model: Any) -> torch.Tensor:
    return exact.head(model, alone(model, [IDS])[0])


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(reduce_dtype=torch.float32)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_same_bits_before_and_after_an_optimizer_step(
    mesh: DeviceMesh, whole: Any, policy: MixedPrecisionPolicy | None, checkpointing: bool
) -> None:
    model = sharded(whole, mesh, policy).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = logits_of(model)
    assert differing_rows([before], [expected_of(whole)]) == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before.square().mean().backward()
    optimizer.step()
    moved = copy.deepcopy(whole)
    moved.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    after = expected_of(moved)
    assert differing_rows([before], [after]) == len(IDS), "the step changed nothing"
    # Gathered weights lie where the old ones lay: a pack that trusted their address would be stale. Without gradients
    # first, as an RL trainer scores what it sampled before it trains on it.
    with torch.no_grad():
        assert differing_rows([logits_of(model)], [after]) == 0
    assert differing_rows([logits_of(model)], [after]) == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert differing_rows([logits_of(model)], [after]) == 0


@pytest.mark.parametrize("output", [None, torch.float32])
def test_mixed_precision_that_rounds_weights_is_refused(
    mesh: DeviceMesh, whole: Any, output: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output)
    with pytest.raises(UnsupportedModel, match="switch off mixed precision"):
        logits_of(sharded(whole, mesh, policy))


def test_a_model_that_is_sharded_already_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(UnsupportedModel, match="FSDPQwen3ForCausalLM"):
        exact.prepare(sharded(models.load("testbed:qwen3"), mesh))


def test_parts_of_a_sharded_model_are_not_called_alone(mesh: DeviceMesh, whole: Any) -> None:
    done = Completion(
        prompt_token_ids=(5, 6),
        token_ids=(7,),
        logprobs=(-1.0,),
        kind=LogprobKind.RAW,
        sampling=SamplingParams(max_tokens=1),
        finish_reason=FinishReason.LENGTH,
        versions=(VersionSpan(WeightVersion("initial", "0" * 64), 0, 1),),
        fingerprint="x",
    )
    model = sharded(whole, mesh)
    for call in (
        lambda: exact.token_logprobs(model, [done]),
        lambda: exact.head(model, torch.zeros(1, model.config.hidden_size)),
    ):
        with pytest.raises(UnsupportedModel, match="sharded by FSDP2"):
            call()

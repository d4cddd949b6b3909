"""FSDP2 around a prepared model, one process on gloo and two: the same bits, or refused with what to do."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zerodrift import exact, models
from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.errors import InvalidPrompt, UnsupportedModel
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.exact import logprobs
from zerodrift.exact.verification import alone, differing_rows

IDS = [5 + number * 37 % 400 for number in range(70)]


def completion(
    prompt: tuple[int, ...], tokens: tuple[int, ...], kind: LogprobKind = LogprobKind.RAW
) -> Completion:
    return Completion(
        prompt_token_ids=prompt,
        token_ids=tokens,
        logprobs=(-1.0,) * len(tokens),
        kind=kind,
        sampling=SamplingParams(max_tokens=max(1, len(tokens)), temperature=0.8),
        finish_reason=FinishReason.LENGTH if tokens else FinishReason.ABORT,
        versions=(VersionSpan(WeightVersion("initial", "0" * 64), 0, len(tokens)),) if tokens else (),
        fingerprint="x",
    )


COMPLETIONS = [
    completion((5, 6), (7, 8, 9)),
    completion((5,), ()),
    completion(tuple(IDS[:40]), tuple(IDS[40:]), LogprobKind.PROCESSED),
]
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


def sharded(
    model: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None, *, reshards: bool = True
) -> Any:
    """As trainers do it: every layer, then the rest."""
    model = copy.deepcopy(model)
    for part in (*model.model.layers, model):
        fully_shard(
            part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy(), reshard_after_forward=reshards
        )
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
    model = sharded(whole, mesh)
    with pytest.raises(UnsupportedModel, match="the head is sharded by FSDP2"):
        exact.head(model, torch.zeros(1, model.config.hidden_size))


@pytest.mark.parametrize("large", [False, True])
def test_completions_are_scored_inside_the_forward(
    mesh: DeviceMesh, whole: Any, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With logits kept for the backward, and made again for it; the weights gathered once, or once more."""
    if large:
        monkeypatch.setattr(logprobs, "LOGIT_BYTES", 4 * whole.config.vocab_size * 5)
    model = sharded(whole, mesh, reshards=large)
    with torch.no_grad():
        before = exact.token_logprobs(model, COMPLETIONS)
    found, expected = (exact.token_logprobs(each, COMPLETIONS) for each in (model, whole))
    for scored in (before, found):
        assert [part.shape for part in scored] == [part.shape for part in expected]
        assert differing_rows([torch.cat(scored)[:, None]], [torch.cat(expected)[:, None]]) == 0
    grads = []
    for scored, each in ((found, model), (expected, whole)):
        torch.cat(scored).square().sum().backward()
        grads.append({name: value.grad for name, value in each.named_parameters()})
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name].full_tensor(), grad)
        assert float(grad.abs().max()) > 0
    whole.zero_grad()
    assert "forward" not in vars(model)


def test_a_policy_that_rounds_log_probabilities_is_refused(mesh: DeviceMesh, whole: Any) -> None:
    model = sharded(whole, mesh, MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    with pytest.raises(UnsupportedModel, match="output_dtype"):
        exact.token_logprobs(model, COMPLETIONS)


def test_bad_completions_are_refused_as_ever(mesh: DeviceMesh, whole: Any) -> None:
    with pytest.raises(InvalidPrompt, match="has token 70000"):
        exact.token_logprobs(sharded(whole, mesh), [completion((70_000,), (1,))])


def test_two_processes(tmp_path: Path) -> None:
    """Different completions on each, none with a token on one; a step of the optimizer; and an empty list on one."""
    command = [sys.executable, str(Path(__file__).with_name("sharded_ranks.py")), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        told = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (out, err) in zip(ranks, told, strict=True):
        assert process.returncode == 0, err
        found = json.loads(out)
        assert found["differing"] == {"before": 0, "after": 0, "nothing": 0}
        assert found["rows"] > 20
        assert found["moved"] > 0
        assert found["furthest gradient"] < 1e-5
        assert found["refused"] == InvalidPrompt.code, "a rank alone would wait for the other"

"""When two paths of one sequence part, the first op that did it is named; when they do not, nothing is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from zerodrift import exact, models
from zerodrift.core.completion import LogprobKind
from zerodrift.core.request import SamplingParams
from zerodrift.exact.first_difference import Difference, first_difference
from zerodrift.exact.ops.cpu import attention
from zerodrift.exact.verification import PromptThenTokens, Schedule, rescored

IDS = [5 + number * 37 % 400 for number in range(24)]
COMPANY = [[7, 8, 9, 10] * 5]
BY_TOKEN = Schedule(0, 16, chunks=(1,), share=1.0)


@pytest.fixture(scope="module")
def model() -> Any:
    return exact.prepare(models.load("testbed:qwen3"))


@contextmanager
def wrong(module: Any, wrongly: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """`module` gives what `wrongly` makes of its output; the bits of a row then depend on how many there are."""
    handle = module.register_forward_hook(lambda _, __, output: wrongly(output))
    try:
        yield
    finally:
        handle.remove()


def few_rows_off(output: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(output, torch.tensor(torch.inf)) if output.shape[1] < 8 else output


@pytest.mark.parametrize("schedule", [BY_TOKEN, PromptThenTokens(15, 16), Schedule(3, 16)])
def test_nothing_differs_and_no_hook_stays(model: Any, schedule: Schedule) -> None:
    assert first_difference(model, IDS, schedule, COMPANY) is None
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.input_layernorm",
        "model.layers.1.self_attn.k_proj",
        "model.layers.1.mlp.act_fn",
        "model.norm",
    ],
)
def test_the_module_is_named(model: Any, path: str) -> None:
    module = model.get_submodule(path)
    with wrong(module, few_rows_off):
        assert first_difference(model, IDS, BY_TOKEN) == Difference(path, type(module).__name__, 0, len(IDS))
        found = first_difference(model, IDS, PromptThenTokens(15, 16))
    assert found == Difference(path, type(module).__name__, 15, len(IDS) - 15)


def test_company_is_seen(model: Any) -> None:
    """Wrong only where two sequences decode together: alone there is nothing to find."""
    layer = model.model.layers[1].mlp.down_proj
    with wrong(layer, lambda output: output * (1 + 2.0**-20) if output.shape[1] == 2 else output):
        assert first_difference(model, IDS, BY_TOKEN) is None
        found = first_difference(model, IDS, BY_TOKEN, COMPANY)
    assert found == Difference("model.layers.1.mlp.down_proj", "ExactLinear", 0, 20)


def test_attention_is_named_though_it_is_no_module(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention.attend_rows

    def wrong_beyond_a_block(q: Any, keys: Any, *rest: Any) -> None:
        real(q, keys, *rest)
        if q.shape[1] < 20:
            rest[-1].mul_(1 + 2.0**-20)

    monkeypatch.setattr(attention, "attend_rows", wrong_beyond_a_block)
    found = first_difference(model, IDS, BY_TOKEN)
    assert found is not None
    assert found[:2] == ("model.layers.0.self_attn.o_proj", "attention")


def test_the_head_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(model.lm_head).rounded_to

    def wrong_for_one(self: Any, x: torch.Tensor, dtype: Any) -> torch.Tensor:
        out = real(self, x, dtype)
        return out * (1 + 2.0**-20) if self is model.lm_head and len(x) == 1 else out

    monkeypatch.setattr(type(model.lm_head), "rounded_to", wrong_for_one)
    assert first_difference(model, IDS, BY_TOKEN) == Difference("lm_head", "ExactLinear", 0, len(IDS))


def test_one_row_that_differs_is_found_among_many(model: Any) -> None:
    def at_seven(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        if output.shape[1] == 8:
            output[0, 7, 3] = torch.nextafter(output[0, 7, 3], torch.tensor(torch.inf))
        return output

    with wrong(model.model.layers[0].mlp, at_seven):
        found = first_difference(model, IDS, PromptThenTokens(8, 16))
    assert found is not None
    assert (found.module, found.position, found.rows) == ("model.layers.0.mlp", 7, 1)


@pytest.mark.parametrize("kind", LogprobKind)
def test_a_completion_is_scored_alone(model: Any, kind: LogprobKind) -> None:
    class Done:
        prompt_token_ids = tuple(IDS[:10])
        token_ids = tuple(IDS[10:])
        sampling = SamplingParams(max_tokens=14, temperature=0.7, top_p=1.0)

    Done.kind = kind  # type: ignore[attr-defined]
    found = rescored(model, Done())  # type: ignore[arg-type]
    beside = exact.token_logprobs(model, [Done(), Done()])  # type: ignore[list-item]
    assert torch.equal(found, beside[1].detach())
    assert not found.requires_grad

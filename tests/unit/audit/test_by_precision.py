"""One part in less precision is named by the numbers that it makes, and nothing else of that size is."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from zerodrift.audit import by_precision as stage
from zerodrift.audit.attribute import Attribution, Costs
from zerodrift.audit.counterfactual.evaluate import CaseWindow, Evaluator
from zerodrift.audit.counterfactual.explanation import Explanation
from zerodrift.audit.counterfactual.path import Paths
from zerodrift.backends import variants
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.request import Prompt, Request, SamplingParams

SAMPLING = SamplingParams(temperature=0.8, max_tokens=6)
TRIED = 160
"""What concerns all layers, and the first layer."""
Judge = Callable[[Callable[[Any], Any]], Attribution | None]


@pytest.fixture
def judge(llama: ReferenceBackend, monkeypatch: pytest.MonkeyPatch) -> Judge:
    monkeypatch.setattr(stage, "MOST_TRIED", TRIED)
    model = variants.in_dtype(llama.model, torch.float32)
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(4, 500, 8).tolist()) for _ in range(8)]
    answers = llama.generate([Request(Prompt(ids), SAMPLING) for ids in prompts])
    outputs = [answer.completions[0].token_ids for answer in answers]

    def run(change: Callable[[Any], Any]) -> Attribution | None:
        empty = [
            CaseWindow(ids, output, SAMPLING, np.zeros(len(output)), np.full(len(output), 4e-6))
            for ids, output in zip(prompts, outputs, strict=True)
        ]
        told = Evaluator(empty, Paths(change(model)).forwards).predict(Explanation()).reported
        ends = np.cumsum([0, *map(len, outputs)])
        windows = [
            window._replace(reported=told[ends[number] : ends[number + 1]])
            for number, window in enumerate(empty)
        ]
        paths = Paths(model)

        def evaluate(some: Any) -> Evaluator:
            return Evaluator(some, paths.forwards)

        everything = Costs(evaluate(windows))
        return stage.by_precision(everything, windows[:3], evaluate, paths, np.random.default_rng(0))

    return run


def down_in_fp8(model: Any) -> Any:
    changed = variants.in_dtype(model, torch.float32)
    weight = changed.base_model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.to(torch.float8_e4m3fn).float()
    return changed


def values_in_fp16(model: Any) -> Any:
    """Values are stored as they are projected."""
    changed = variants.in_dtype(model, torch.float32)
    for layer in changed.base_model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, output: output.half().float())
    return changed


def other_weights(model: Any) -> Any:
    changed = variants.in_dtype(model, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in changed.base_model.layers[0].parameters():
        parameter.data *= 1 + 2e-3 * torch.randn(parameter.shape, generator=generator)
    return changed


@pytest.mark.parametrize(
    ("change", "cause", "says"),
    [
        (down_in_fp8, "path/weight-quantisation", "weights down_proj of layer 0 in fp8"),
        (values_in_fp16, "path/kv-precision", "values of all layers in fp16"),
    ],
)
def test_a_part_in_less_precision_is_named(
    judge: Judge, change: Callable[[Any], Any], cause: str, says: str
) -> None:
    found = judge(change)
    assert found is not None
    (selected,) = found.selected
    assert (selected.cause, selected.message) == (cause, says)
    assert selected.explained > 0.9


@pytest.mark.parametrize("change", [lambda model: variants.in_dtype(model, torch.bfloat16), other_weights])
def test_rounding_everywhere_and_other_weights_are_no_single_part(
    judge: Judge, change: Callable[[Any], Any]
) -> None:
    assert judge(change) is None

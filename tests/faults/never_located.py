"""Rounding of many kinds in many models, none of which may be located: `python tests/faults/never_located.py [SETS]`.

A set is a testbed model with tokens that it sampled; each is scored in twenty ways that round. What is counted is how
often linear response says that such a difference follows a part of the model, how often it says where, and how often one of
the changes that are tried outright is believed; those are tried in every fourth way, since they are some hundred forwards.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from zerodrift.audit.attribute import Costs
from zerodrift.audit.counterfactual.evaluate import CaseWindow, Evaluator
from zerodrift.audit.counterfactual.explanation import Explanation
from zerodrift.audit.counterfactual.path import Paths
from zerodrift.audit.diagnose import quickest
from zerodrift.audit.outright import try_outright
from zerodrift.audit.response.answer import Localisation
from zerodrift.audit.response.derivatives import LinearResponse
from zerodrift.audit.response.locate import followed_by
from zerodrift.backends import variants
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.stats.arrays import Floats

MODELS = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "qwen3-moe")
SETS = 10
OUTRIGHT_EVERY = 4
SEQUENCES, WINDOW, SIGMA = 30, 8, 4e-6
SAMPLING = SamplingParams(max_tokens=16)
BF16, FP16 = torch.bfloat16, torch.float16
Change = Callable[[Any], Any]


def body_in(dtype: torch.dtype) -> Change:
    """All layers compute in `dtype`, embedding and head do not."""

    def change(model: Any) -> Any:
        changed, wide = copy.deepcopy(model), model.dtype
        decoder = changed.base_model
        for part in (decoder.layers, decoder.norm):
            for parameter in part.parameters():
                parameter.data = parameter.data.to(dtype)
        decoder.embed_tokens.register_forward_hook(lambda _, __, hidden: hidden.to(dtype))
        decoder.norm.register_forward_hook(lambda _, __, hidden: hidden.to(wide))
        return changed

    return change


def products(rounded: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """What goes into every product of a linear is rounded, and sums are not."""

    def change(model: Any) -> Any:
        changed = copy.deepcopy(model)
        for module in changed.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = rounded(module.weight.data)
                module.register_forward_pre_hook(lambda _, given: (rounded(given[0]), *given[1:]))
        return changed

    return change


def stored(rounded: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Weights of the layers are rounded, and nothing else."""

    def change(model: Any) -> Any:
        changed = copy.deepcopy(model)
        for parameter in changed.base_model.layers.parameters():
            if parameter.dim() > 1:
                parameter.data = rounded(parameter.data)
        return changed

    return change


def given_by_linears(rounded: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """What comes out of every linear of the layers is rounded, as in kernels that write a narrow dtype."""

    def change(model: Any) -> Any:
        changed = copy.deepcopy(model)
        for module in changed.base_model.layers.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda _, __, output: rounded(output))
        return changed

    return change


def through(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


def fp8(tensor: torch.Tensor) -> torch.Tensor:
    """One scale to a tensor."""
    scale = tensor.abs().amax().clamp(min=1e-12) / 448
    return (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale


def fp8_rows(tensor: torch.Tensor) -> torch.Tensor:
    scale = tensor.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448
    return (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale


def cut(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """fp32 with the lowest bits cut off, as TF32 units do it."""
    mask = -(1 << bits)
    return lambda tensor: (
        (tensor.float().contiguous().view(torch.int32) & mask).view(torch.float32).to(tensor.dtype)
    )


class Way(NamedTuple):
    """A model that rounds, and the layout it runs in."""

    change: Change
    layout: dict[str, Any]


AS_IT_IS: Change = lambda model: model  # noqa: E731 - beside its like
ALONE = {"layout": Layout.ALONE}
EAGER = {"layout": Layout.ALONE, "attention": "eager"}
CHUNKED = {"layout": Layout.CHUNKED, "chunk": 24}
PADDED = {"layout": Layout.PADDED, "batch": 5}
WAYS = {
    **{f"body-bf16-{n}": Way(body_in(BF16), way) for n, way in enumerate((ALONE, EAGER, CHUNKED, PADDED))},
    **{f"body-fp16-{n}": Way(body_in(FP16), way) for n, way in enumerate((ALONE, EAGER, CHUNKED))},
    "everything-bf16": Way(lambda model: variants.in_dtype(model, BF16), ALONE),
    "everything-fp16": Way(lambda model: variants.in_dtype(model, FP16), ALONE),
    "products-tf32-cut": Way(products(cut(13)), ALONE),
    "products-cut-16": Way(products(cut(16)), ALONE),
    "products-bf16": Way(products(through(BF16)), ALONE),
    "products-fp16": Way(products(through(FP16)), ALONE),
    "outputs-bf16": Way(given_by_linears(through(BF16)), ALONE),
    "outputs-fp16": Way(given_by_linears(through(FP16)), CHUNKED),
    "weights-fp8": Way(stored(fp8), ALONE),
    "weights-fp8-rows": Way(stored(fp8_rows), ALONE),
    "weights-bf16": Way(stored(through(BF16)), ALONE),
    "sums-eager": Way(AS_IT_IS, EAGER),
    "sums-chunked": Way(AS_IT_IS, CHUNKED),
}


class Judged(NamedTuple):
    model: str
    seed: int
    way: str
    answer: Localisation | None
    outright: str = ""
    """What was believed of all that was tried outright."""


def judge_set(model: str, seed: int, ways: dict[str, Way] = WAYS) -> Iterator[Judged]:
    """All ways of rounding one model on tokens that it sampled."""
    reference = ReferenceBackend(f"testbed:{model}")
    plain = variants.in_dtype(reference.model, torch.float32)
    windows = sampled(reference, seed)
    response = LinearResponse(plain, windows, reference.facts.eos_token_ids)
    sequences = [window.prompt + window.output for window in windows]
    starts = [len(window.prompt) + window.before for window in windows]
    for name, way in ways.items():
        teacher = Teacher(way.change(plain), **way.layout)
        told: list[Floats] = [each.double().numpy() for each in teacher.logprobs(sequences, starts)]
        reported = [window._replace(reported=each) for window, each in zip(windows, told, strict=True)]
        answer = followed_by(response, reported, np.random.default_rng(seed))
        tried = (list(ways).index(name) + seed) % OUTRIGHT_EVERY == 0
        believed = outright(plain, reported, reference.facts.eos_token_ids) if tried else ""
        yield Judged(model, seed, name, answer, believed)


def outright(plain: Any, windows: list[CaseWindow], stops: tuple[int, ...]) -> str:
    """What the audit would believe of the changes that it tries outright; empty where it believes none."""
    paths = Paths(plain)
    evaluate = partial(Evaluator, forwards=paths.forwards, stop_ids=stops)
    everything = Costs(evaluate(windows))
    if everything.at_floor(Explanation()):
        return ""
    found = try_outright(everything, quickest(everything), evaluate, paths, np.random.default_rng(0))
    return "" if found.attribution is None else found.attribution.selected[0].message


def sampled(reference: ReferenceBackend, seed: int) -> list[CaseWindow]:
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(4, 500, int(rng.integers(12, 40))).tolist()) for _ in range(SEQUENCES)]
    requests = [
        Request(Prompt(ids), msgspec.structs.replace(SAMPLING, seed=seed * 1000 + number))
        for number, ids in enumerate(prompts)
    ]
    windows = []
    for ids, answer in zip(prompts, reference.generate(requests), strict=True):
        output = answer.completions[0].token_ids
        judged = min(WINDOW, len(output))
        windows.append(
            CaseWindow(
                ids, output, SAMPLING, np.zeros(judged), np.full(judged, SIGMA), before=len(output) - judged
            )
        )
    return windows


def main(sets: int) -> None:
    """Count."""
    runs = followed = located = believed = 0
    worst = 0.0
    for number in range(sets):
        for judged in judge_set(MODELS[number % len(MODELS)], seed=number):
            runs += 1
            believed += bool(judged.outright)
            if judged.outright:
                print(judged.model, judged.seed, judged.way, judged.outright, flush=True)  # noqa: T201
            if judged.answer is None:
                continue
            worst = max(worst, judged.answer.r2)
            followed += judged.answer.follows
            located += bool(judged.answer.located)
            if judged.answer.follows:
                print(judged.model, judged.seed, judged.way, judged.answer.message, flush=True)  # noqa: T201
        told = f"{followed} follow a knob, {located} located, {believed} outright, largest R² {worst:.3f}"
        print(f"{runs} runs: {told}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SETS)

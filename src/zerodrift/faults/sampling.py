"""Faults of the sampled distribution: other parameters than those requested, or noise that is shared.

The completion claims the requested parameters, as an engine does that echoes what it was sent.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from zerodrift import models
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.errors import CapabilityMissing
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.faults.processing import sampled_logprobs
from zerodrift.faults.rewriting import as_requested, restated, rewrite
from zerodrift.faults.wrapper import FaultyBackend, Plant, fact_of, innermost, unstated_defaults

Parameters = Callable[[SamplingParams], SamplingParams]

GENERATION_DEFAULTS: Mapping[str, float] = {"repetition_penalty": 1.05, "top_p": 0.9}
"""As Qwen2.5 ships them, nearly: a penalty and a truncation that no trainer replays."""

_BIASED_TOKENS = 5
_BIAS = 2.0


class OtherParameters(FaultyBackend):
    """Samples and reports under other parameters than those it claims."""

    def __init__(self, inner: Backend, change: Parameters) -> None:
        super().__init__(inner)
        self._change = change

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Sent changed, answered as if not."""
        sent = [
            msgspec.structs.replace(request, sampling=self._change(request.sampling)) for request in requests
        ]
        return rewrite(requests, self.inner.generate(sent), as_requested)


class BiasedTokens(OtherParameters):
    """Samples under other parameters, and reports what the requested ones would have given these tokens."""

    def __init__(self, inner: Backend, change: Parameters, hotter: float = 1.0) -> None:
        """`hotter` is the ratio of the temperature that is sampled to the one that is reported."""
        super().__init__(inner, change)
        self._hotter = hotter

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Tokens from one distribution, logprobs from another."""
        if any(request.sampling.truncates for request in requests):
            raise CapabilityMissing(
                "this fault draws tokens that a requested top-p, top-k or min-p would exclude, and those have no "
                "logprob: request top_p=1, top_k=0, min_p=0"
            )
        answers = super().generate(requests)
        claims = [
            (request.sampling, completion)
            for request, answer in zip(requests, answers, strict=True)
            for completion in answer.completions
        ]
        values = iter(_logprobs_as_claimed(self.inner, claims))
        return rewrite(requests, answers, lambda _, each: restated(each, next(values), self._hotter))


class SharedNoise(FaultyBackend):
    """Every sample of a request is the first one."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Asks for one sample and hands out copies of it."""
        alone = [
            msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, n=1))
            for request in requests
        ]
        answers = rewrite(requests, self.inner.generate(alone), as_requested)
        return [
            msgspec.structs.replace(
                answer,
                completions=tuple(
                    msgspec.structs.replace(each, sample_index=index)
                    for each in answer.completions
                    for index in range(request.sampling.n)
                ),
                problems=answer.problems * request.sampling.n,
            )
            for request, answer in zip(requests, answers, strict=True)
        ]


def write_model_with_defaults(
    spec: str | Path, directory: str | Path, defaults: Mapping[str, float] = GENERATION_DEFAULTS
) -> Path:
    """The model as a directory of its own whose generation_config.json has sampling defaults."""
    target = Path(directory)
    if (source := Path(spec)).is_dir():
        shutil.copytree(source, target)
    else:
        models.materialise(spec, target)
    path = target / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    # Without do_sample, transformers takes the defaults for a mistake and says so.
    settings |= {"do_sample": True, **defaults}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return target


def _logprobs_as_claimed(
    engine: Backend, claims: Sequence[tuple[SamplingParams, Completion]]
) -> list[list[float]]:
    """What the claimed parameters give the tokens of each completion, by teacher forcing."""
    if not claims:
        return []
    reference = innermost(engine)
    if isinstance(reference, ReferenceBackend):
        return [_as_claimed(reference, sampling, completion) for sampling, completion in claims]
    if not all(_plain(sampling) for sampling, _ in claims):
        raise CapabilityMissing(
            f"{engine.name} scores at temperature 1 only, and this fault must report what was requested: "
            "request temperature 1 without penalties, truncation or bias, or use the reference engine"
        )
    scores = engine.score([completion.sequence for _, completion in claims])
    return [
        values[len(completion.prompt_token_ids) - 1 :]
        for values, (_, completion) in zip(scores, claims, strict=True)
    ]


@torch.no_grad()
def _as_claimed(reference: ReferenceBackend, sampling: SamplingParams, completion: Completion) -> list[float]:
    """One forward over one sequence: how a batch is laid out is the auditor's code, and so no business of a fault."""
    prompt, output = completion.prompt_token_ids, completion.token_ids
    logits_LV = reference.model(torch.tensor([completion.sequence]), use_cache=False).logits[0]
    # The row of a position predicts the token after it.
    rows_TV = logits_LV[len(prompt) - 1 : -1].double().numpy()
    return [
        float(sampled_logprobs(row_V, sampling, prompt, output[:place], reference.facts.eos_token_ids)[token])
        for place, (row_V, token) in enumerate(zip(rows_TV, output, strict=True))
    ]


def _plain(params: SamplingParams) -> bool:
    return params.own_distribution and not params.greedy


def _fixed(**values: Any) -> Parameters:
    return lambda params: params.with_in_force(**values)


def _heated(factor: float) -> Parameters:
    return lambda params: msgspec.structs.replace(params, temperature=params.temperature * factor)


def _with_defaults(engine: Backend) -> Backend:
    """Fills in what a request leaves at its neutral value, as engines do with what a request leaves out."""
    neutral, defaults = SamplingParams(), unstated_defaults(engine)

    def fill(params: SamplingParams) -> SamplingParams:
        missing = {
            name: value for name, value in defaults.items() if getattr(params, name) == getattr(neutral, name)
        }
        return params.with_in_force(**missing)

    return OtherParameters(engine, fill)


def _biased(engine: Backend) -> Backend:
    bias = dict.fromkeys(_frequent_tokens(engine), _BIAS)
    return OtherParameters(
        engine, lambda params: msgspec.structs.replace(params, logit_bias={**params.logit_bias, **bias})
    )


def _frequent_tokens(engine: Backend) -> list[int]:
    """What the engine itself says most in a small seeded sample; a bias on rare tokens would not be seen."""
    sampling = SamplingParams(seed=0, max_tokens=16, n=2, ignore_eos=True)
    answers = engine.generate([Request(Prompt((token,)), sampling) for token in range(4, 8)])
    said = Counter(
        token for answer in answers for completion in answer.completions for token in completion.token_ids
    )
    # More or fewer ends of sequence would show in the lengths before anyone looked at a logprob.
    for token in fact_of(engine, "eos_token_ids") or ():
        said.pop(token, None)
    ranked = sorted(said, key=lambda token: (-said[token], token))
    return ranked[:_BIASED_TOKENS]


def _plant(change: Parameters) -> Callable[[Backend], Backend]:
    return lambda engine: OtherParameters(engine, change)


SAMPLING_FAULTS: Mapping[str, Plant] = {
    "semantic/temperature:0.9-instead": _plant(_heated(0.9)),
    "semantic/temperature:ignored": _plant(_fixed(temperature=1.0)),
    "semantic/truncation-mass:top-p-0.95": _plant(_fixed(top_p=0.95)),
    "semantic/truncation-mass:top-k-20": _plant(_fixed(top_k=20)),
    "semantic/penalty:repetition-1.05": _plant(_fixed(repetition_penalty=1.05)),
    "semantic/penalty:presence-0.5": _plant(_fixed(presence_penalty=0.5)),
    "semantic/penalty:frequency-0.3": _plant(_fixed(frequency_penalty=0.3)),
    "semantic/logit-bias:five-tokens": _biased,
    "semantic/generation-config:default": _with_defaults,
    "semantic/seed:shared": SharedNoise,
    "semantic/sampling-bias:hotter-1.2": lambda engine: BiasedTokens(engine, _heated(1.2), hotter=1.2),
    "semantic/sampling-bias:top-p-0.95": lambda engine: BiasedTokens(engine, _fixed(top_p=0.95)),
}

"""Ten engine bugs that were written without a look at how causes are attributed, for measuring just that.

`true_names` was settled from the sentences in `core.cause` alone, before the bug was run: the causes whose sentence
is true of the bug, and `unexplained` where none is. All of them hide: parameters, version and fingerprint are those of
the healthy engine. They are made for a `ReferenceBackend` in float32 that reports processed logprobs. Shapes: B rows,
L positions, K keys, H hidden, T tokens, V vocabulary.
"""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import msgspec
import torch
from planted import UNEXPLAINED, Planted

from zerodrift.backends import generation
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.completion import Answer, Completion, TokenAlternative
from zerodrift.core.request import Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.faults.wrapper import FaultyBackend, clone, the_reference
from zerodrift.sampler.noise import uniform
from zerodrift.sampler.processing import TokenHistory, histories, processed_logprobs

Damage = Callable[[Any], None]
"""Changes a transformers model in place."""


class _Broken(FaultyBackend):
    """A twin of the reference engine, whose model is damaged, and damaged again after each update."""

    inside: ClassVar[bool] = True

    def __init__(self, engine: Backend, damage: Damage) -> None:
        twin = clone(engine)
        super().__init__(twin)
        self.reference: ReferenceBackend = the_reference(twin)
        self._damage = damage
        self.reference.model = copy.deepcopy(self.reference.model)
        self._break()

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        super().load_weights(directory, version)
        self._break()

    def _break(self) -> None:
        self._damage(self.reference.model)
        self.reference.teacher = Teacher(
            self.reference.model, layout=Layout.PADDED, batch=self.reference.batch
        )


def _damaged(damage: Damage) -> Callable[[Backend], Backend]:
    return lambda engine: _Broken(engine, damage)


# Inside the model.


def _base_two_softmax(model: Any) -> None:
    """2^x = e^(x ln 2)."""
    for layer in model.model.layers:
        layer.self_attn.scaling *= math.log(2)


def _soft_cap(model: Any) -> None:
    cap = 30.0
    model.lm_head.register_forward_hook(lambda _, __, logits_BLV: cap * torch.tanh(logits_BLV / cap))


def _truncated_residual(model: Any) -> None:
    """The upper 16 bits of an fp32 are a bf16, rounded towards zero."""

    def cut(_: Any, __: Any, hidden_BLH: torch.Tensor) -> torch.Tensor:
        bits_BLH = hidden_BLH.float().contiguous().view(torch.int32) & -0x10000
        return bits_BLH.view(torch.float32).to(hidden_BLH.dtype)

    for layer in model.model.layers:
        layer.register_forward_hook(cut)


def _adapter_twice(model: Any) -> None:
    """The checkpoint holds W + BA already; what is added here is BA once more."""
    rank, alpha = 8, 16
    generator = torch.Generator().manual_seed(20)
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            down = torch.randn(rank, linear.in_features, generator=generator) / math.sqrt(linear.in_features)
            up = torch.randn(linear.out_features, rank, generator=generator) * 0.005
            linear.weight.data += ((alpha / rank) * up @ down).to(linear.weight.dtype)


_PAGE = 16


def _page_given_twice(model: Any) -> None:
    """Positions 32 to 47 are written over positions 0 to 15, whose entries in the block table still point there.

    In terms of a mask: the old key is gone as soon as the new one is written, and the new one counts twice.
    """

    def misread(module: Any, args: Any, options: dict[str, Any]) -> Any:
        hidden_BLH, positions_BL = options["hidden_states"], options["position_ids"]
        cache = options.get("past_key_values")
        keys = hidden_BLH.shape[1] + (0 if cache is None else cache.get_seq_length(module.layer_idx))
        # Padding is all on one side, so the last query tells where the keys are.
        position_BK = torch.arange(keys) - (keys - 1 - positions_BL[:, -1:])
        query_BL1, key_B1K = positions_BL[:, :, None], position_BK[:, None, :]
        visible_BLK = (key_B1K >= 0) & (key_B1K <= query_BL1)
        lost_BLK = (key_B1K < _PAGE) & (key_B1K + 2 * _PAGE <= query_BL1)
        doubled_B1K = (key_B1K >= 2 * _PAGE) & (key_B1K < 3 * _PAGE)
        bias_BLK = torch.zeros(visible_BLK.shape, dtype=hidden_BLH.dtype)
        bias_BLK = bias_BLK.masked_fill(doubled_B1K, math.log(2))
        bias_BLK = bias_BLK.masked_fill(~visible_BLK | lost_BLK, torch.finfo(hidden_BLH.dtype).min)
        return args, {**options, "attention_mask": bias_BLK[:, None]}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(misread, with_kwargs=True)


# Between logits and token.


class _DynamicTemperature(FaultyBackend):
    """Flat distributions are heated and peaked ones cooled, by up to half of the temperature."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        with mock.patch.object(generation, "processed_logprobs", _at_dynamic_temperature):
            return super().generate(requests)


def _at_dynamic_temperature(
    logits_TV: torch.Tensor, params: SamplingParams, rows: Sequence[TokenHistory], stop_ids: Sequence[int]
) -> torch.Tensor:
    if not params.greedy:
        logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
        entropy_T1 = -(logprobs_TV.exp() * logprobs_TV).sum(dim=-1, keepdim=True)
        logits_TV = logits_TV / (0.5 + entropy_T1 / math.log(logits_TV.shape[-1]))
    return processed_logprobs(logits_TV, params, rows, stop_ids)


_PADDING = 64


class _PaddedVocabulary(_Broken):
    """The head has 64 rows more than there are tokens: never drawn, and counted in the softmax."""

    def __init__(self, engine: Backend) -> None:
        super().__init__(engine, _pad_head)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        with mock.patch.object(generation, "processed_logprobs", _of_tokens_alone):
            return super().generate(requests)


def _pad_head(model: Any) -> None:
    """New rows are drawn like the old ones, as `resize_token_embeddings` draws them."""
    weight_VH = model.lm_head.weight.data
    generator = torch.Generator().manual_seed(64)
    rows = torch.randn(_PADDING, weight_VH.shape[1], generator=generator).to(weight_VH.dtype)
    padded = weight_VH.mean(dim=0) + rows * weight_VH.std(dim=0)
    model.lm_head.weight = torch.nn.Parameter(torch.cat([weight_VH, padded]), requires_grad=False)


def _of_tokens_alone(
    logits_TV: torch.Tensor, params: SamplingParams, rows: Sequence[TokenHistory], stop_ids: Sequence[int]
) -> torch.Tensor:
    return processed_logprobs(logits_TV, params, rows, stop_ids)[:, :-_PADDING]


class _ExponentialNoise(FaultyBackend):
    """Takes the argmax of logits plus -log(u), where -log(-log(u)) would make it a sample."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        with mock.patch.object(generation, "choose", _choose_by_exponential_noise):
            return super().generate(requests)


def _choose_by_exponential_noise(logprobs_V: torch.Tensor, noise: float) -> int:
    generator = torch.Generator().manual_seed(int(noise * 2**53))
    uniform_V = torch.rand(logprobs_V.shape, generator=generator, dtype=torch.float64)
    return int((logprobs_V - torch.log1p(-uniform_V)).argmax())


# In what is reported.


class _DraftLogprobs(FaultyBackend):
    """Drafts with all layers but the last, verifies with all, and reports accepted tokens as the draft saw them.

    Verification leaves the samples the model's own, p. One of them was an accepted draft with probability
    min(1, q / p), q being the draft's: that is drawn here, after the fact.
    """

    inside: ClassVar[bool] = True

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        draft = Teacher(_without_last_layer(the_reference(self.inner).model), layout=Layout.PADDED)
        return [
            msgspec.structs.replace(
                answer, completions=tuple(_as_drafted(draft, each) for each in answer.completions)
            )
            for answer in super().generate(requests)
        ]


def _without_last_layer(model: Any) -> Any:
    draft = copy.deepcopy(model)
    draft.model.layers = draft.model.layers[:-1]
    draft.config.num_hidden_layers -= 1
    return draft


def _as_drafted(draft: Teacher, completion: Completion) -> Completion:
    params, prompt = completion.sampling, completion.prompt_token_ids
    (logits_TV,) = draft.logits([completion.sequence], [len(prompt)])
    drafted_TV = processed_logprobs(logits_TV, params, histories(prompt, completion.token_ids))
    values, alternatives = list(completion.logprobs), list(completion.top_logprobs)
    for place, token in enumerate(completion.token_ids):
        said = float(drafted_TV[place, token])
        # Another place of the same noise: independent of the draw that chose the token.
        accepted = uniform(params.seed or 0, completion.sample_index, 100_000 + place)
        if math.isinf(said) or accepted >= math.exp(min(0.0, said - values[place])):
            continue
        values[place] = said
        if alternatives:
            best = drafted_TV[place].topk(len(alternatives[place]))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            alternatives[place] = tuple(TokenAlternative(other, value) for other, value in pairs)
    return msgspec.structs.replace(completion, logprobs=tuple(values), top_logprobs=tuple(alternatives))


class _TwoDecimals(FaultyBackend):
    """Every logprob on its way out is formatted with two decimals."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return [
            msgspec.structs.replace(answer, completions=tuple(map(_formatted, answer.completions)))
            for answer in super().generate(requests)
        ]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[round(value, 2) for value in values] for values in super().score(sequences)]


def _formatted(completion: Completion) -> Completion:
    return msgspec.structs.replace(
        completion,
        logprobs=tuple(round(value, 2) for value in completion.logprobs),
        top_logprobs=tuple(
            tuple(TokenAlternative(each.token_id, round(each.logprob, 2)) for each in alternatives)
            for alternatives in completion.top_logprobs
        ),
        prompt_logprobs=tuple(
            None if value is None else round(value, 2) for value in completion.prompt_logprobs
        ),
    )


BLIND = (
    Planted(
        "attention-base-two",
        "An attention kernel that works with exp2 forgets to fold log2(e) into its scale, so that its softmax has "
        "base 2.",
        _damaged(_base_two_softmax),
        frozenset({UNEXPLAINED}),
    ),
    Planted(
        "logit-soft-cap",
        "The final logits are soft-capped at 30, as another model family wants it, since a default of the runner "
        "was left on.",
        _damaged(_soft_cap),
        frozenset({UNEXPLAINED}),
    ),
    Planted(
        "two-decimals",
        "The server writes logprobs into its JSON with two decimals.",
        _TwoDecimals,
        frozenset({UNEXPLAINED}),
    ),
    Planted(
        "padded-vocabulary",
        "The embeddings were resized to a multiple of the shard size, and the softmax counts the rows that were added, "
        "of which no token is ever drawn.",
        _PaddedVocabulary,
        frozenset({UNEXPLAINED, "semantic/sampling-bias"}),
    ),
    Planted(
        "dynamic-temperature",
        "A sampler for chat is left on that follows the entropy of each row, from half of the requested temperature "
        "to one and a half.",
        _DynamicTemperature,
        frozenset({"semantic/temperature"}),
    ),
    Planted(
        "draft-logprobs",
        "Self-speculation with an early exit verifies rightly, and reports for each accepted token the logprob that "
        "the draft gave it.",
        _DraftLogprobs,
        frozenset({"path/spec-decode", "semantic/sampling-bias"}),
    ),
    Planted(
        "exponential-noise",
        "A sampler of the Gumbel-max kind takes one logarithm where it should take two, so that its noise is "
        "exponential; the logprobs are right.",
        _ExponentialNoise,
        frozenset({"semantic/sampling-bias"}),
    ),
    Planted(
        "page-given-twice",
        "The KV page of positions 0 to 15 is freed while in use, and handed to the same sequence again for positions "
        "32 to 47.",
        _damaged(_page_given_twice),
        frozenset({"path/context-boundary"}),
    ),
    Planted(
        "adapter-twice",
        "The trainer sends weights with its LoRA adapter merged in, and the engine applies the adapter on top once "
        "more, which is twice its scale.",
        _damaged(_adapter_twice),
        frozenset({"weights/lora"}),
    ),
    Planted(
        "truncated-residual",
        "The residual stream is handed from layer to layer in bf16, made by cutting off the low bits of fp32 rather "
        "than by rounding.",
        _damaged(_truncated_residual),
        frozenset({"path/body-precision"}),
    ),
)

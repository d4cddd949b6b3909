"""The sampled distribution once more, for faults that must state right numbers beside wrong tokens.

`zerodrift.sampler.processing` is what the counterfactuals predict with: a bug in it would be in the fault and in its
explanation alike, and cancel. This is written from the documented meaning of each parameter (`SamplingParams`), in
fp64, one row and one token at a time, and tests/property/test_sampler.py holds the two together.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from zerodrift.core.request import SamplingParams
from zerodrift.stats.arrays import Floats


def sampled_logprobs(
    logits: ArrayLike,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int] = (),
) -> Floats:
    """The distribution of the token after `output`, from its row of logits; -inf is never drawn."""
    scores = np.array(logits, dtype=np.float64)
    if len(output) < params.min_tokens:
        for token in (*stop_ids, *params.stop_token_ids):
            scores[token] = -math.inf
    for token, value in params.logit_bias.items():
        scores[token] += value
    for token in {*prompt, *output}:
        if scores[token] > 0:
            scores[token] /= params.repetition_penalty
        else:
            scores[token] *= params.repetition_penalty
    for token, times in Counter(output).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * times
    if not params.greedy:
        scores /= params.temperature
    if params.truncates:
        kept = _kept(scores, params)
        scores = np.array([score if token in kept else -math.inf for token, score in enumerate(scores)])
    assert scores.max() > -math.inf, "an engine that draws a token has left one to draw"
    normalised: Floats = scores - np.logaddexp.reduce(scores)
    return normalised


def _kept(scores: Floats, params: SamplingParams) -> set[int]:
    """Tokens that min-p, top-k and top-p leave, in this order, each looking at what the one before left."""
    # Of equals the lower id ranks lower, as in vLLM's stable sort; only top-p ever parts equals.
    ranked = sorted(np.flatnonzero(scores > -math.inf).tolist(), key=lambda token: (-scores[token], -token))
    likeliest = scores[ranked[0]]
    ranked = [token for token in ranked if math.exp(scores[token] - likeliest) >= params.min_p]
    if 0 < params.top_k < len(ranked):
        last = scores[ranked[params.top_k - 1]]
        ranked = [token for token in ranked if scores[token] >= last]
    return set(_nucleus(ranked, scores, params.top_p))


def _nucleus(ranked: Sequence[int], scores: Floats, top_p: float) -> list[int]:
    """The first of `ranked` whose mass together reaches `top_p` of the mass of all; at least the likeliest."""
    if top_p == 1:
        return list(ranked)
    weights = [math.exp(scores[token] - scores[ranked[0]]) for token in ranked]
    enough = top_p * math.fsum(weights)
    nucleus, mass = [], 0.0
    for token, weight in zip(ranked, weights, strict=True):
        nucleus.append(token)
        mass += weight
        if mass >= enough:
            break
    return nucleus

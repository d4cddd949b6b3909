"""Is it decoding that is wrong, or what was done to numbers after it?

The logits of an output's first token are those of its prompt's last: a prefill computes them. What decoding computes
otherwise leaves first tokens right and reaches nearly all that come after; what is done to logits or to reported numbers
reaches both. Only what depends on the tokens before, as penalties do, or on how many there are, looks like decoding: that
moves a few logits, and all others of a position by one and the same number; or it bends all of them by one smooth curve,
as another temperature or a cap does. Another forward moves each logit by a number of its own.
"""

from collections.abc import Sequence
from math import comb

import msgspec
import numpy as np
import torch

from zerodrift.audit.checked_calls import generated
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion
from zerodrift.core.request import Request
from zerodrift.drift.gates import Gates
from zerodrift.stats.arrays import Floats

BY_CHANCE = 1e-4
"""So rarely would faults that choose their tokens by chance spare every first one."""
ALTERNATIVES = 20
"""The most that vLLM gives unless it was told otherwise."""
MOSTLY = 0.5
DEGREE = 3
"""Of the curve: a temperature is a line, a soft cap bends once."""
SMOOTH = 0.02
"""Of how far alternatives are moved apart, what a curve may miss: another forward misses about all of it."""


def decoded_only(pairs: Sequence[tuple[Floats, Floats]], gates: Gates) -> bool:
    """Whether the two sides of each pair agree on its first token and part at those after it, and that is no chance."""
    off = [np.abs(one - other) > gates.p90 for one, other in pairs if len(one)]
    tokens, firsts, wrong = sum(map(len, off)), len(off), sum(int(row.sum()) for row in off)
    if not wrong or any(row[0] for row in off):
        return False
    return comb(tokens - firsts, wrong) < BY_CHANCE * comb(tokens, wrong)


def processed_alike(
    engine: Backend, reference: ReferenceBackend, requests: Sequence[Request], gates: Gates
) -> bool:
    """Whether most positions that are off have the reference's logits but for a few: no other forward does that.

    `requests` at temperature 1 without truncation. False where the engine shows no alternatives.
    """
    if Capability.TOP_LOGPROBS not in engine.capabilities:
        return False
    asked = [
        Request(each.prompt, msgspec.structs.replace(each.sampling, logprobs=ALTERNATIVES))
        for each in requests
    ]
    completions = [
        one for each in asked for one in generated(engine, [each])[0].completions if one.top_logprobs
    ]
    places = [place for one in completions for place in _alternatives(reference, one)]
    off = [(right, moved) for right, moved in places if np.abs(moved).max() > gates.outlier]
    alike = [bent_alike(right, moved, gates.outlier) for right, moved in off]
    return len(alike) > 0 and float(np.mean(alike)) > MOSTLY


def bent_alike(right: Floats, moved: Floats, limit: float) -> bool:
    """Whether most alternatives of a position moved by one number, or all by a smooth curve of what they should be."""
    if float(np.median(np.abs(moved - np.median(moved)))) <= limit:
        return True
    # With as many points as a curve has coefficients anything is one.
    if len(right) < 4 * DEGREE or np.ptp(right) == 0:
        return False
    curve = np.polynomial.Polynomial.fit(right, moved, deg=DEGREE)
    return bool(np.abs(moved - curve(right)).max() <= max(limit, SMOOTH * np.ptp(moved)))


def _alternatives(reference: ReferenceBackend, completion: Completion) -> list[tuple[Floats, Floats]]:
    """Of each position what the reference has for every alternative, and by how much the engine is off."""
    (rows_TV,) = reference.teacher.logits([completion.sequence], [len(completion.prompt_token_ids)])
    right_TV = torch.log_softmax(rows_TV.double(), dim=-1).cpu().numpy()
    places = []
    for entry, row_V in zip(completion.top_logprobs, right_TV, strict=True):
        right = np.array([row_V[each.token_id] for each in entry])
        places.append((right, np.array([each.logprob for each in entry]) - right))
    return places

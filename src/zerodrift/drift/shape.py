"""What does Δ look like, when no cause explains it? Regressions that point a reader in a direction.

Slope on log p (a changed temperature), on position (rotary or cache), the first token against the rest (the
boundary between prefill and decode), tokens seen before against new ones (a penalty), and the spread between
sequences (a replica, or a few broken requests).
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from zerodrift.drift.tokens import TokenTable
from zerodrift.stats.arrays import Floats

CLEAR = 0.5
"""Of a correlation, or of a mean of signs; ±1e-3 of noise on 200 tokens stays within 0.2."""
TWICE = math.log(2)
FEW = 3.0
"""Times the mean of all sequences; those of sound noise have 1, and one broken one of ten has ten."""


def shape(table: TokenTable) -> dict[str, float]:
    """Named statistics of Δ; each is near zero where that direction is innocent."""
    possible = np.isfinite(table.contracted)
    if not possible.any():
        return {"possible_tokens": 0.0}
    delta, size = table.delta[possible], np.abs(table.delta[possible])
    first = table.index[possible] == 0
    by_sequence = _means(size, table.sequence[possible])
    return {
        "slope_on_log_p": _correlation(delta, table.contracted[possible]),
        "growth_with_position": _correlation(size, table.position[possible].astype(np.float64)),
        "first_token_excess": _excess(size, first),
        "repeated_token_excess": _excess(size, _repeated(table)[possible]),
        "signed_bias": float(delta.mean() / max(size.mean(), 1e-30)),
        "sequence_concentration": float(by_sequence.max() / max(by_sequence.mean(), 1e-30)),
    }


def describe(statistics: Mapping[str, float]) -> str:
    """What stands out of them, as a sentence; where nothing does, that."""
    if "possible_tokens" in statistics:
        return "no sampled token is possible under the requested parameters"
    said = [words for name, value in statistics.items() if (words := _words(name, value))]
    if not said:
        return "Δ points nowhere: no slope on log p, no growth with position, no kind of token and no sequence stands out"
    return "Δ has a shape: " + ", ".join(said)


def _words(name: str, value: float) -> str:
    """Of a statistic that stands out; nothing of another."""
    sizes = {
        "slope_on_log_p": (
            abs(value) > CLEAR,
            f"it follows log p (r = {value:+.2f}), as another temperature would make it",
        ),
        "growth_with_position": (value > CLEAR, f"|Δ| grows with the position (r = {value:+.2f})"),
        "first_token_excess": (
            value > TWICE,
            f"first tokens are off {math.exp(value):.1f} times as much as others",
        ),
        "repeated_token_excess": (
            value > TWICE,
            f"repeated tokens are off {math.exp(value):.1f} times as much as new ones",
        ),
        "signed_bias": (
            abs(value) > CLEAR,
            # Of whoever reported them: a trainer's numbers are asked too.
            f"the logprobs are too {'low' if value > 0 else 'high'} nearly everywhere",
        ),
        "sequence_concentration": (value > FEW, f"one sequence is off {value:.1f} times as much as the mean"),
    }
    stands_out, words = sizes[name]
    return words if stands_out else ""


def _repeated(table: TokenTable) -> NDArray[np.bool_]:
    """Whether a token stands in its own output before."""
    words = table.sequence * (int(table.token.max()) + 1) + table.token
    repeated = np.ones(len(words), dtype=np.bool_)
    repeated[np.unique(words, return_index=True)[1]] = False
    return repeated


def _correlation(one: Floats, other: Floats) -> float:
    if one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _excess(size: Floats, chosen: NDArray[np.bool_]) -> float:
    """How much larger |Δ| is where chosen, as a log ratio."""
    if not chosen.any() or chosen.all():
        return 0.0
    return float(np.log((size[chosen].mean() + 1e-12) / (size[~chosen].mean() + 1e-12)))


def _means(values: Floats, groups: NDArray[np.int64]) -> Floats:
    sums = np.bincount(groups, weights=values)
    counts = np.bincount(groups)
    result: Floats = sums[counts > 0] / counts[counts > 0]
    return result

"""What are these rollouts worth to the trainer? Effective sample sizes and what the usual clips would cut.

All from ρ = exp(Δ) as it is, before any clip, over the tokens that the request allows.
"""

from typing import NamedTuple

import numpy as np

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.ratios import ClipFraction, clip_fraction, sequence_ess, token_ess
from zerodrift.view.run_directory import Tokens

# PPO's own range (Schulman 2017), DAPO's clip-higher (2503.14476), and the band of two-sided truncated importance
# sampling: verl, slime and ms-swift all cap at 2.
_RANGES = (
    ("PPO, ε = 0.2", 0.2, 0.2),
    ("DAPO, clip-higher", 0.2, 0.28),
    ("importance sampling, cap 2", 0.5, 1.0),
)


class Clip(NamedTuple):
    """A range of ratios that people use, and the tokens outside."""

    name: str
    low: float
    high: float
    outside: ClipFraction


class Usability(NamedTuple):
    """Shares in (0, 1]."""

    token_ess: float
    sequence_ess: float
    sequences: int
    clips: tuple[Clip, ...]


def usability(tokens: Tokens) -> Usability | str:
    """The panel, or why there is none: numbers that no ratio can be made of are an answer too."""
    possible = tokens.possible
    delta, sequence = tokens.delta[possible], tokens.sequence[possible]
    try:
        return Usability(
            token_ess=token_ess(delta),
            sequence_ess=sequence_ess(delta, sequence),
            sequences=np.unique(sequence).size,
            clips=tuple(
                Clip(name, 1 - low, 1 + high, clip_fraction(delta, low=low, high=high))
                for name, low, high in _RANGES
            ),
        )
    except InvalidValue as error:
        return str(error)

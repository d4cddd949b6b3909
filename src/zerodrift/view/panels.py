"""The report's panels beside its plots: facts side by side, what the rollouts are worth, and the worst tokens.

Facts of a fingerprint come in three parts, because they mean different things: other semantics are other numbers, other
numerics are other rounding, another deployment must change nothing. Two engines rarely publish the same facts, so a
fact that only one side states is no difference. Ratios are ρ = exp(Δ) as they are, before any clip, over the tokens that
the request allows. Tokens are ranked by |Δ|/σ, not by |Δ|: a rare token rounds further than a common one and would win
every other ranking.
"""

from typing import NamedTuple

import numpy as np

from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import InvalidValue
from zerodrift.stats.ratios import ClipFraction, clip_fraction, sequence_ess, token_ess
from zerodrift.view.run_directory import Tokens
from zerodrift.view.visible import visible_token

_PARTS = {
    "semantic": "What the numbers mean. A difference here is a difference in meaning.",
    "numeric": "How they are computed. A difference here explains rounding.",
    "deployment": "Where they are computed. A difference here must change nothing.",
}


class Fact(NamedTuple):
    """One setting as both sides state it; None where one of them does not."""

    name: str
    engine: str | None
    reference: str | None

    @property
    def differs(self) -> bool:
        """Both sides state it, and not alike."""
        return None not in (self.engine, self.reference) and self.engine != self.reference


class FingerprintPart(NamedTuple):
    """One third of the fingerprints, differing facts first."""

    name: str
    message: str
    engine_digest: str
    reference_digest: str
    facts: tuple[Fact, ...]

    @property
    def num_differing(self) -> int:
        """Facts that both sides state, and not alike."""
        return sum(fact.differs for fact in self.facts)


def compare(engine: EngineFingerprint, reference: EngineFingerprint) -> tuple[FingerprintPart, ...]:
    """The three parts, side by side."""
    parts = []
    for name, message in _PARTS.items():
        left, right = getattr(engine, name), getattr(reference, name)
        facts = [Fact(key, left.get(key), right.get(key)) for key in sorted(left.keys() | right.keys())]
        # Sorting is stable: names stay in order within those that differ, both state, and one states.
        facts.sort(key=lambda fact: (not fact.differs, None in (fact.engine, fact.reference)))
        digests = engine.digests()[name], reference.digests()[name]
        parts.append(FingerprintPart(name, message, *digests, tuple(facts)))
    return tuple(parts)


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


MOST = 20
AROUND = 10
"""Tokens shown on either side, as far as the output goes; prompts are not in tokens.parquet."""


class Neighbour(NamedTuple):
    """One token of the context, as it can be shown."""

    text: str
    token: int
    worst: bool = False
    """It is the one that the context is about."""


class WorstToken(NamedTuple):
    """One token with both sides' numbers and its surroundings."""

    sequence: int
    position: int
    token: int
    reported: float
    contracted: float
    delta: float
    sigmas: float
    """|Δ| in units of what rounding alone does."""
    context: tuple[Neighbour, ...]
    begins: bool
    """The context begins where the output begins."""
    ends: bool


def worst(tokens: Tokens, most: int = MOST) -> tuple[WorstToken, ...]:
    """The `most` worst tokens that differ at all, worst first."""
    sigmas = np.abs(tokens.delta) / tokens.sigma
    order = np.argsort(-sigmas, kind="stable")[:most]
    return tuple(_in_context(tokens, int(row), float(sigmas[row])) for row in order if sigmas[row] > 0)


def _in_context(tokens: Tokens, row: int, sigmas: float) -> WorstToken:
    # Rows are ordered by sequence, so the sequence of a row is a range of rows.
    sequence = tokens.sequence[row]
    first = int(np.searchsorted(tokens.sequence, sequence, side="left"))
    last = int(np.searchsorted(tokens.sequence, sequence, side="right"))
    begin, end = max(first, row - AROUND), min(last, row + AROUND + 1)
    texts = tokens.text.slice(begin, end - begin).to_pylist()
    return WorstToken(
        sequence=int(sequence),
        position=int(tokens.position[row]),
        token=int(tokens.token[row]),
        reported=float(tokens.reported[row]),
        contracted=float(tokens.contracted[row]),
        delta=float(tokens.delta[row]),
        sigmas=sigmas,
        context=tuple(
            Neighbour(visible_token(text or ""), int(tokens.token[begin + offset]), begin + offset == row)
            for offset, text in enumerate(texts)
        ),
        begins=begin == first,
        ends=end == last,
    )

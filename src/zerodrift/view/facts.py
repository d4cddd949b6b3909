"""In what do engine and reference differ, by their own account?

Three parts, because they mean different things: other semantics are other numbers, other numerics are other
rounding, another deployment must change nothing. Two engines rarely publish the same facts, so a fact that only one
side states is no difference.
"""

from typing import NamedTuple

from zerodrift.core.completion import EngineFingerprint

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
        return self.engine is not None and self.reference is not None and self.engine != self.reference


class Part(NamedTuple):
    """One third of the fingerprints, differing facts first."""

    name: str
    says: str
    engine_digest: str
    reference_digest: str
    facts: tuple[Fact, ...]

    @property
    def num_differing(self) -> int:
        """Facts that both sides state, and not alike."""
        return sum(fact.differs for fact in self.facts)


def compare(engine: EngineFingerprint, reference: EngineFingerprint) -> tuple[Part, ...]:
    """The three parts, side by side."""
    return tuple(_part(name, says, engine, reference) for name, says in _PARTS.items())


def _part(name: str, says: str, engine: EngineFingerprint, reference: EngineFingerprint) -> Part:
    left, right = getattr(engine, name), getattr(reference, name)
    facts = [Fact(key, left.get(key), right.get(key)) for key in sorted(left.keys() | right.keys())]
    return Part(
        name=name,
        says=says,
        engine_digest=engine.digests()[name],
        reference_digest=reference.digests()[name],
        # Sorting is stable: names stay in order within those that differ, both state, and one states.
        facts=tuple(
            sorted(facts, key=lambda fact: (not fact.differs, fact.engine is None or fact.reference is None))
        ),
    )

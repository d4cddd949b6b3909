"""Is it the same policy, who is wrong, why, and what do I type? The four answers that a verdict gives.

Page and terminal say the same thing because both say what stands here.
"""

from typing import NamedTuple

from zerodrift.records.verdict import CauseFound, Outcome, VerdictRecord

_HEADLINES = {
    Outcome.PASS: "The same policy",
    Outcome.FAIL: "Not the same policy",
    Outcome.INCONCLUSIVE: "Not judged",
}


class Answers(NamedTuple):
    """What a reader wants to know first."""

    headline: str
    """Whether it is the same policy."""
    guilty: str
    """The side that left the other two, in words."""
    why: str
    """The conclusion in one sentence."""
    to_fix: tuple[CauseFound, ...]
    """Causes that fail the audit, principal first; their fixes are what to type."""
    listed: tuple[CauseFound, ...]
    """Causes below the gate: known, and not in the way."""

    @property
    def principal(self) -> CauseFound | None:
        """The cause to fix first."""
        return self.to_fix[0] if self.to_fix else None


def answers(record: VerdictRecord) -> Answers:
    """The answers that `record` gives."""
    return Answers(
        headline=_HEADLINES[record.verdict],
        guilty=_guilty(record),
        why=record.says,
        to_fix=tuple(cause for cause in record.causes if cause.gating),
        listed=tuple(cause for cause in record.causes if not cause.gating),
    )


def _guilty(record: VerdictRecord) -> str:
    sides = {
        "engine": f"The engine ({record.engine.engine})",
        "trainer": "The trainer",
        "none": "Neither side",
        "unknown": "Not known",
    }
    return sides.get(record.guilty, record.guilty)

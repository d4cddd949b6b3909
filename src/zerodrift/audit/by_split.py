"""A difference that no explanation predicts and that only some tokens or requests have: what is said of it.

A position from which on numbers are wrong has a name, and one that can be refuted: outputs that cross the position must
go wrong as they cross it, whatever their prompt is; no other property may part the tokens as well; and |Δ| must jump there
rather than grow (`drift/split.py`). Rounding reaches every token, so whatever parts them refutes it.
"""

from collections.abc import Iterable

import msgspec

from zerodrift.audit.counterfactual.boundary import Parted
from zerodrift.audit.counterfactual.properties import CACHED, POSITION, edge, in_words
from zerodrift.audit.probes.result import found, with_fix
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.drift.split import Split
from zerodrift.records.verdict import CauseFound, FoundBy

NAMES = {POSITION: "path/context-boundary", CACHED: "path/prefix-cache"}
"""Properties that have a cause of their own, where those that are off have the higher value."""


def nameless(causes: Iterable[CauseFound]) -> bool:
    """Whether nothing that gates predicts numbers, nor was found in a place of the model."""
    return all(
        (cause.cause == UNEXPLAINED and not cause.located) or cause.found_by == FoundBy.SIZE
        for cause in causes
        if cause.gating
    )


def with_split(causes: tuple[CauseFound, ...], parted: Parted | None, engine: str) -> tuple[CauseFound, ...]:
    """The same causes, with what parts right from wrong."""
    if parted is None:
        return causes
    split = parted.split
    hints = tuple(
        msgspec.structs.replace(cause, gating=False)
        for cause in causes
        if cause.cause != UNEXPLAINED and cause.found_by != FoundBy.SIZE
    )
    said = "split: " + in_words(split) + (f"; {parted.note}" if parted.note else "")
    if any(cause.found_by == FoundBy.SIZE for cause in causes):
        said += "; |Δ| is as large as rounding, which would reach all of them"
    said = "; ".join([said, *(cause.evidence for cause in causes if cause.cause == UNEXPLAINED)])
    if name := _name(split):
        said = f"{_began(split)}; {said}" if name == NAMES[POSITION] else said
        return (found(name, engine, FoundBy.VALUE, said, explained=split.share, gating=True), *hints)
    unnamed = found(UNEXPLAINED, engine, FoundBy.VALUE, said, explained=0.0, interval=(0.0, 0.0))
    places = " or ".join(split.cuts)
    fix = f"look at what the engine does otherwise there, by {places}: another kernel, cache or limit that begins at this value"
    return (with_fix(unnamed, fix), *hints)


def _name(split: Split) -> str | None:
    """The cause of the one property that parts them; None where it has none, or another parts them as well."""
    return NAMES.get(split.cut.name) if split.cut.above and not split.alike else None


def _began(split: Split) -> str:
    place = edge(split.cut)
    between = f"between positions {place.replace('–', ' and ')}" if "–" in place else f"at position {place}"
    return f"numbers go wrong {between}"

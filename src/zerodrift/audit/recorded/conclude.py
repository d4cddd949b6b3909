"""One conclusion from all sides: who is guilty, in which words, and since when.

The rules are those of an audit; what is added is the side. Where engine and trainer show the same numbers, and these
are not the checkpoint's, a known cause may still explain them (both report raw logprobs). If none does, the checkpoint
is the odd one out of three, and the only honest answer is that it cannot be told. Nor can it where every cause is a
parameter that may have been requested, and the dump does not say.
"""

from collections.abc import Sequence

import msgspec

from zerodrift.audit import verdict as judging
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.audit.recorded.reading import how_to_state, open_to_doubt
from zerodrift.audit.recorded.sides import Side, Sides
from zerodrift.audit.verdict import LEAST_EXPLAINED, OTHER_MODEL, Conclusion
from zerodrift.core.cause import CAUSES, Layer
from zerodrift.records.verdict import CauseFound, Outcome

WEIGHT_SYNC = "weight sync"
ODD_CHECKPOINT = (
    "Engine and trainer agree with each other and not with the checkpoint: it is not the one that made these "
    "rollouts, or the dump leaves out how they were sampled."
)


def conclude(
    sides: Sides,
    results: Sequence[ProbeResult],
    causes: Sequence[CauseFound],
    *,
    same_numbers: bool,
    silent: Sequence[str] = (),
) -> Conclusion:
    """`same_numbers`: engine and trainer both left the reference, and for the same place; `silent`: what is not stated."""
    conclusion = judging.conclude(results, causes)
    if conclusion.verdict is not Outcome.FAIL:
        return conclusion
    if names := _may_be_requested(sides, conclusion, silent):
        says = (
            f"The numbers fit the checkpoint under other parameters than were assumed, and the dump does not state "
            f"{', '.join(names)}: {how_to_state(names)}, and ask again."
        )
        # With its fix it would read as a fault of the engine, which it may not be.
        listed = tuple(msgspec.structs.replace(cause, gating=False) for cause in conclusion.causes)
        return Conclusion(Outcome.INCONCLUSIVE, "unknown", says, listed)
    if same_numbers and not _named(causes):
        return Conclusion(Outcome.INCONCLUSIVE, "unknown", ODD_CHECKPOINT, conclusion.causes)
    principal = next((cause for cause in conclusion.causes if cause.gating), None)
    names = list(sides.guilty)
    says = conclusion.says
    if principal is not None and principal.cause == OTHER_MODEL:
        says += " Is --model the checkpoint that made these rollouts?"
    elif principal is not None and CAUSES[principal.cause].layer is Layer.WEIGHTS:
        # A sampler that still has the old weights draws their tokens, whatever numbers are reported with those.
        names = [WEIGHT_SYNC if name in {"engine", "sampler"} else name for name in names]
    if names == ["trainer"] and principal is not None and CAUSES[principal.cause].layer is not Layer.TRAINER:
        # The sentences of other causes speak of an engine.
        says = f"The trainer's logprobs are not those of the checkpoint; {principal.evidence}."
    return Conclusion(Outcome.FAIL, " and ".join(names), says, conclusion.causes)


def _may_be_requested(sides: Sides, conclusion: Conclusion, silent: Sequence[str]) -> list[str]:
    """Parameters without which nothing is a fault; none where something is one whatever was requested.

    Numbers that are right while the samples, or the trainer's numbers, are not contradict those under any parameters.
    """
    if "engine" not in sides.guilty:
        return []
    doubts = [open_to_doubt(cause, silent) for cause in conclusion.causes if cause.gating]
    return list(dict.fromkeys(name for names in doubts for name in names)) if doubts and all(doubts) else []


def _named(causes: Sequence[CauseFound]) -> bool:
    """A cause that explains why both could be off together: how numbers are read, never which weights made them."""
    return any(
        cause.explained >= LEAST_EXPLAINED and CAUSES[cause.cause].layer is Layer.SEMANTIC for cause in causes
    )


def side_in_words(guilty: str, sides: Sides) -> str:
    """The guilty side, and the one that speaks against it."""
    words = {
        "none": "none: what the dump shows is the checkpoint's",
        "unknown": "cannot be told",
        "engine": "engine: its logprobs leave the checkpoint's",
        "trainer": "trainer: its logprobs leave the checkpoint's and the engine's do not",
        "sampler": "sampler: the reported logprobs are right, and the tokens were not drawn from them",
        WEIGHT_SYNC: f"{WEIGHT_SYNC}: the engine's logprobs are those of the weights from before",
    }.get(guilty, f"{guilty}: each leaves the checkpoint by itself")
    if guilty in ("engine", WEIGHT_SYNC) and sides.trainer is not None:
        words += ", and the trainer's are the checkpoint's"
    return words


def since_in_words(sides: Sides) -> str:
    """When each guilty side went wrong."""
    guilty = sides.guilty
    if not guilty:
        return "nothing to date"
    told = {name: _since(side) for name, side in guilty.items()}
    return "; ".join(words if len(told) == 1 else f"{name} {words}" for name, words in told.items())


def _since(side: Side) -> str:
    return "not known" if side.since is None else side.since.says

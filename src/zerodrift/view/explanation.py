"""In one sentence: what changed between two runs, and where should one look?

The part that explains most is named, and no other: where the meaning of the numbers changed, how they are rounded is
no news. A fact that one run alone states is no difference, for releases publish more or fewer of them. Rounding never
explains a cause of another layer, and equal fingerprints explain nothing.
"""

from collections.abc import Sequence

from zerodrift.core.cause import CAUSES, Layer
from zerodrift.view.comparison import Comparison, FactChange, Part
from zerodrift.view.notation import number
from zerodrift.view.visible import visible

MOST_FACTS = 3
"""More than that is a list, and the list stands above the sentence."""
LONGEST_FACT = 60
LEAST_SHARED = 16
"""Tokens that both runs sampled, before equal bits among them say something."""


def explain(comparison: Comparison) -> str:
    """The sentence."""
    return f"{_outcome(comparison)}{_drift(comparison)}; {_reason(comparison)}"


def _outcome(comparison: Comparison) -> str:
    before, after = comparison.verdict_before, comparison.verdict_after
    if before is after:
        verdict = f"The verdict stays {after}"
    else:
        verdict = f"The verdict went from {before} to {after}"
    appeared, gone = _appeared(comparison), [c.name for c in comparison.causes if c.before == "fails"]
    causes = [f"with {name}" for name in appeared] + [f"without {name}" for name in gone]
    return " ".join([verdict, " and ".join(map(visible, causes))]).rstrip()


def _appeared(comparison: Comparison) -> list[str]:
    """Causes that fail the second run and did not fail the first."""
    return [cause.name for cause in comparison.causes if cause.after == "fails"]


def _drift(comparison: Comparison) -> str:
    mean = next((each for each in comparison.numbers if each.name == "mean |Δ|"), None)
    if mean is None or mean.before is None or mean.after is None:
        return ""
    if mean.before == mean.after:
        return f", mean |Δ| unchanged at {number(mean.after)}"
    return f", mean |Δ| from {number(mean.before)} to {number(mean.after)}"


def _reason(comparison: Comparison) -> str:
    for part in Part:
        if facts := [fact for fact in comparison.facts if fact.part is part and _differs(fact)]:
            named = _named(facts)
            if comparison.measured_alike:
                return f"{part} facts differ ({named}), and nothing that was measured does."
            return _reasons(comparison, part).format(facts=named)
    if comparison.measured_alike:
        return "every fact that both state and every number is the same."
    look = (
        "look at the weights and at determinism: does the second run, repeated, give its own numbers again?"
    )
    if alone := [fact for fact in comparison.facts if not _differs(fact)]:
        return f"what both runs state is equal, and {_named(alone)} only one of them states; otherwise {look}"
    return f"fingerprints and questions are equal, so {look}"


def _differs(fact: FactChange) -> bool:
    """Both state it; a question that was not asked is a statement too."""
    return fact.part is Part.QUESTIONS or None not in (fact.before, fact.after)


def _reasons(comparison: Comparison, part: Part) -> str:
    if part is Part.NUMERIC and (beyond := _beyond_rounding(comparison)):
        return (
            "the numbers are computed another way ({facts}), but rounding does not make "
            f"{visible(beyond)}: look for a setting that the engine does not tell."
        )
    if part is Part.NUMERIC and _other_draws(comparison):
        return (
            "the engine is another ({facts}), and gives the same tokens the same logprobs to the last bit: what "
            "changed is which tokens a seed draws."
        )
    return {
        Part.SEMANTIC: "the numbers mean something else ({facts}), which likely explains it: settle that first.",
        Part.QUESTIONS: "other questions were asked ({facts}), which likely explains it: ask both runs the same.",
        Part.NUMERIC: "the numbers are computed another way ({facts}), which likely explains it as rounding.",
        Part.DEPLOYMENT: "only the deployment differs ({facts}), which must change nothing: look at batching, "
        "scheduling and determinism.",
    }[part]


def _other_draws(comparison: Comparison) -> bool:
    """Other tokens are all that the answers to the same requests differ in."""
    answers = comparison.answers
    if answers is None or comparison.worse or answers.same_tokens == answers.samples:
        return False
    return answers.shared_tokens >= LEAST_SHARED and not answers.differing


def _beyond_rounding(comparison: Comparison) -> str | None:
    """The first cause that appeared and that no way of computing makes."""
    layers = {name: CAUSES[name].layer for name in _appeared(comparison) if name in CAUSES}
    return next((name for name, layer in layers.items() if layer not in (Layer.PATH, Layer.NONE)), None)


def _named(facts: Sequence[FactChange]) -> str:
    shown = [_change(fact) for fact in facts[:MOST_FACTS]]
    if len(facts) > MOST_FACTS:
        shown.append(f"and {len(facts) - MOST_FACTS} more")
    return ", ".join(shown)


def _change(fact: FactChange) -> str:
    owner = "" if fact.side == "audit" else f"{fact.side}'s "
    return f"{owner}{visible(fact.name, LONGEST_FACT)} {_value(fact.before)} → {_value(fact.after)}"


def _value(value: str | None) -> str:
    return "not stated" if value is None else visible(value, LONGEST_FACT)

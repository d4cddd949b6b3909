"""A gross difference that no fit and no derivative explains: faults that are there or not, each tried outright.

Weights in each other's place, parts that are missing or there twice, another activation, embeddings times sixteen: there
are some hundred, and each is one model. All are tried on one window, where the true one leaves nothing; whatever does so
is then tried on all windows, and only what brings all of them to the floor is believed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.audit.attribute import Attribution, Costs, attribute
from zerodrift.audit.counterfactual.evaluate import CaseWindow, Evaluator
from zerodrift.audit.counterfactual.exchanged import exchanges
from zerodrift.audit.counterfactual.explanation import Explanation, Hypothesis
from zerodrift.audit.counterfactual.heads import exchanged_heads
from zerodrift.audit.counterfactual.misbuilt import misbuilt
from zerodrift.audit.counterfactual.path import Paths
from zerodrift.audit.counterfactual.position import FitCost, dial_hypotheses
from zerodrift.audit.counterfactual.scaled import scale_dials
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.audit.response.answer import Localisation
from zerodrift.records.evidence import LocatedEvidence

GROSS = 0.02
"""Nats of mean |Δ| from which on this is tried. Chosen, not measured: less is nothing gross, and derivatives were asked."""
MOST_TRIED = 2000
AT_ONCE = 32
"""Candidates whose rows of logits are kept together: 1.5 MB each with a vocabulary of 49,152."""
FIT_WINDOWS = 2
"""Factors are fitted on so many."""
FINALISTS = 3
"""Where none leaves nothing of the one window, so many of the best are tried on all."""
LEAST_GAIN = 12.0
"""Nats that a finalist must gain on the one window."""

Evaluate = Callable[[Sequence[CaseWindow]], Evaluator]


class Tried(NamedTuple):
    """How many were tried, and what came of it."""

    candidates: int
    attribution: Attribution | None
    """None where none of them explains every number."""


def try_outright(
    everything: Costs,
    screen: Sequence[CaseWindow],
    evaluate: Evaluate,
    paths: Paths,
    rng: np.random.Generator,
) -> Tried:
    """`screen`: short windows that are off throughout; `evaluate` makes evaluators over the forwards of `paths`."""
    search = _Search(everything, screen, evaluate, paths, rng)
    healthy = np.abs(everything.residual(Explanation()))
    if not float(np.nanmean(healthy)) > GROSS:
        return Tried(0, None)
    return search.run()


class _Search:
    """One difference, and every candidate in turn."""

    def __init__(
        self,
        everything: Costs,
        screen: Sequence[CaseWindow],
        evaluate: Evaluate,
        paths: Paths,
        rng: np.random.Generator,
    ) -> None:
        self._everything, self._screen, self._evaluate = everything, screen, evaluate
        self._paths, self._rng = paths, rng
        self._count = 0

    def run(self) -> Tried:
        best: list[tuple[float, Variant]] = []
        for gain, at_floor, variant in self._tried():
            if at_floor and (found := self._believed(variant)) is not None:
                return Tried(self._count, found)
            best = sorted([*best, (gain, variant)], key=lambda pair: -pair[0])[:FINALISTS]
        for gain, variant in best:
            if gain > LEAST_GAIN and (found := self._believed(variant)) is not None:
                return Tried(self._count, found)
        return Tried(self._count, None)

    def _tried(self) -> Iterator[tuple[float, bool, Variant]]:
        """Of each candidate what it gains on the one window, in nats, and whether that leaves nothing of it."""
        model = self._paths.model
        yield from self._dials()
        candidates = islice(chain(misbuilt(model), exchanged_heads(model), exchanges(model)), MOST_TRIED)
        while some := list(islice(candidates, AT_ONCE)):
            # Anew for each few: evaluators keep every row that they were asked for.
            costs = Costs(self._evaluate(self._screen[:1]))
            now = costs.total(Explanation())
            for variant in some:
                self._count += 1
                explanation = self._explanation(variant)
                yield now - costs.total(explanation), costs.at_floor(explanation), variant

    def _dials(self) -> Iterator[tuple[float, bool, Variant]]:
        costs = Costs(self._evaluate(self._screen[:FIT_WINDOWS]))
        fit = FitCost(costs.total, costs.residual, costs.at_floor)
        dials = scale_dials(self._paths.model)
        self._count += sum(len(dial.looks) for dial in dials)
        variants: dict[str, Variant] = {}
        watched = [dial._replace(variant=_remembering(dial.variant, variants)) for dial in dials]
        now = costs.total(Explanation())
        for hypothesis in dial_hypotheses(Explanation(), self._paths, fit, [watched]):
            changed = hypothesis.explanation
            yield now - costs.total(changed), costs.at_floor(changed), variants[changed.forward]

    def _explanation(self, variant: Variant) -> Explanation:
        return Explanation(forward=self._paths.add(variant.message, variant))

    def _believed(self, variant: Variant) -> Attribution | None:
        """What all windows say of it; None unless every number is predicted."""
        message = f"{variant.message} ({self._count} discrete changes were tried)"
        hypothesis = Hypothesis(variant.cause, message, self._explanation(variant), 1)

        def propose(explanation: Explanation) -> list[Hypothesis]:
            return [hypothesis] if explanation == Explanation() else []

        found = attribute(self._everything, propose, self._rng)
        if not found.by_value:
            return None
        if variant.located is None:
            return found
        return msgspec.structs.replace(found, response=self._answer(found, variant.located))

    def _answer(self, found: Attribution, where: LocatedEvidence) -> Localisation:
        healthy, left = (self._everything.residual(each) for each in (Explanation(), found.explanation))
        whole = float(np.nansum(healthy**2))
        where = msgspec.structs.replace(where, r2=1 - float(np.nansum(left**2)) / whole)
        share = 1 - float(np.nansum(np.abs(left))) / float(np.nansum(np.abs(healthy)))
        return Localisation(r2=where.r2, null=0.0, follows=True, knobs=(where,), to_floor=True, share=share)


def _remembering(
    make: Callable[[float], Variant], variants: dict[str, Variant]
) -> Callable[[float], Variant]:
    """A dial's own, and each that it made is found again by the name of its forward."""

    def made(value: float) -> Variant:
        variant = make(value)
        variants[variant.message] = variant
        return variant

    return made

"""A gross difference that no fit and no derivative explains: faults that are there or not, each tried outright.

Weights in each other's place, parts that are missing or there twice, another activation, numbers that are limited, rows of the
embedding that are another token's: there are some hundred, and each is one model. All are tried on one window, where the true one leaves nothing; whatever does so
is then tried on all windows, and only what brings all of them to the floor is believed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.audit.attribute import AT_FLOOR, Attribution, Costs, attribute
from zerodrift.audit.counterfactual.bands import bands, refined
from zerodrift.audit.counterfactual.embedded import rows_of_others, suspects
from zerodrift.audit.counterfactual.evaluate import CaseWindow, Evaluator
from zerodrift.audit.counterfactual.exchanged import exchanges
from zerodrift.audit.counterfactual.explanation import Explanation, Hypothesis
from zerodrift.audit.counterfactual.heads import exchanged_heads, moved_heads
from zerodrift.audit.counterfactual.limited import leaks, limit_dials
from zerodrift.audit.counterfactual.misbuilt import misbuilt
from zerodrift.audit.counterfactual.path import Paths
from zerodrift.audit.counterfactual.position import LEAST_HOPE, At, FitCost, dial_hypotheses
from zerodrift.audit.counterfactual.scaled import scale_dials
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.audit.response.answer import Localisation
from zerodrift.audit.response.in_attention import with_capped_scores
from zerodrift.records.evidence import LocatedEvidence

GROSS = 0.02
"""Nats of mean |Δ| from which on exchanges of weights and heads are tried. Chosen, not measured: less is nothing gross. What is no
exchange is tried however small it is: an activation that is limited where few numbers reach shows no derivative."""
MOST_TRIED = 2000
AT_ONCE = 32
"""Candidates whose rows of logits are kept together: 1.5 MB each with a vocabulary of 49,152."""
FIT_WINDOWS = 2
"""Factors are fitted on so many."""
REFINED = 3
"""Of looks at one kind of value so many are refined."""
FINALISTS = 3
"""Where none leaves nothing of the one window, so many of the best are tried on all."""
LEAST_GAIN = 12.0
"""Nats that a finalist must gain on the one window."""

CERTAINLY_OFF = 25.0
"""σ, as `diagnose` has it."""
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
    return _Search(everything, screen, evaluate, paths, rng).run()


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
        yield from self._rows()
        yield from self._dials()
        yield from self._each(chain(misbuilt(model), leaks(model), moved_heads(model)), self._screen[:1])
        yield from self._limits()
        yield from self._bands()
        if float(np.nanmean(np.abs(self._everything.residual(Explanation())))) > GROSS:
            exchanged = islice(chain(exchanged_heads(model), exchanges(model)), MOST_TRIED)
            yield from self._each(exchanged, self._screen[:1])

    def _each(
        self, candidates: Iterator[Variant], windows: Sequence[CaseWindow]
    ) -> Iterator[tuple[float, bool, Variant]]:
        while some := list(islice(candidates, AT_ONCE)):
            # Anew for each few: evaluators keep every row that they were asked for.
            costs = Costs(self._evaluate(windows))
            now = costs.total(Explanation())
            for variant in some:
                self._count += 1
                explanation = self._explanation(variant)
                yield now - costs.total(explanation), costs.at_floor(explanation), variant

    def _rows(self) -> Iterator[tuple[float, bool, Variant]]:
        """Rows of the embedding, where a few tokens can account for all that is off."""
        cases = self._everything.evaluator.cases
        sigmas = self._everything.sigmas(Explanation())
        suspected = suspects(cases, sigmas > CERTAINLY_OFF, sigmas <= AT_FLOOR)
        if suspected is not None:
            variants = rows_of_others(self._paths.model, suspected.ids)
            yield from self._each(variants, [cases[suspected.window]])

    def _limits(self) -> Iterator[tuple[float, bool, Variant]]:
        """Numbers that saturate: the best looks at where, each refined."""
        windows = self._screen[:FIT_WINDOWS]
        dials = limit_dials(
            self._paths.model, [(*each.prompt, *each.output) for each in windows], with_capped_scores
        )
        looks = [(dial, value) for dial in dials for value in dial.looks]
        at = {dial.variant(value).message: (dial, value) for dial, value in looks}
        tried = self._each((dial.variant(value) for dial, value in looks), windows)
        for _, _, variant in _best(tried):
            dial, value = at[variant.message]
            costs, fit = self._fit(windows)
            fitted = dial.variant(dial.refine(self._at(dial.variant), fit, value))
            yield self._gained(costs, fitted)

    def _bands(self) -> Iterator[tuple[float, bool, Variant]]:
        """Some rotary frequencies: the best looks at which and by how much, each refined."""
        windows = self._screen[:FIT_WINDOWS]
        looks = {band.variant.message: band for band in bands(self._paths.model)}
        for _, _, variant in _best(self._each((band.variant for band in looks.values()), windows)):
            costs, fit = self._fit(windows)
            fitted = refined(looks[variant.message], fit, self._explanation)
            yield self._gained(costs, fitted.variant)

    def _fit(self, windows: Sequence[CaseWindow]) -> tuple[Costs, FitCost]:
        costs = Costs(self._evaluate(windows))
        return costs, FitCost(costs.total, costs.residual, costs.at_floor)

    def _at(self, make: Callable[[float], Variant]) -> At:
        return lambda value: self._explanation(make(value))

    def _gained(self, costs: Costs, variant: Variant) -> tuple[float, bool, Variant]:
        explanation = self._explanation(variant)
        return (
            costs.total(Explanation()) - costs.total(explanation),
            costs.at_floor(explanation),
            variant,
        )

    def _dials(self) -> Iterator[tuple[float, bool, Variant]]:
        costs, fit = self._fit(self._screen[:FIT_WINDOWS])
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


def _best(tried: Iterator[tuple[float, bool, Variant]]) -> list[tuple[float, bool, Variant]]:
    """Those of several looks that gained most, where any gained anything."""
    gained = [each for each in tried if each[0] > LEAST_HOPE]
    return sorted(gained, key=lambda each: -each[0])[:REFINED]


def _remembering(
    make: Callable[[float], Variant], variants: dict[str, Variant]
) -> Callable[[float], Variant]:
    """A dial's own, and each that it made is found again by the name of its forward."""

    def made(value: float) -> Variant:
        variant = make(value)
        variants[variant.message] = variant
        return variant

    return made

"""A difference of rounding's size: is it one part of the model in less precision? Each is tried, and must predict Δ itself.

Size alone names nothing in an engine that reports fp32. A part that was stored in a narrow dtype moves every logprob by a
number of its own, which the reference has too when the same part is rounded there: Δ less that is little, and for any
other part, or for rounding by other kernels, it is more than Δ was.
"""

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from zerodrift.audit.attribute import AT_FLOOR, Attribution, Costs, attribute
from zerodrift.audit.counterfactual.evaluate import CaseWindow, Evaluator
from zerodrift.audit.counterfactual.explanation import Explanation, Hypothesis
from zerodrift.audit.counterfactual.narrowed import narrowed
from zerodrift.audit.counterfactual.path import Paths
from zerodrift.audit.counterfactual.variant import Variant

TOO_FAR = 0.5
"""Nats of median |Δ|, as linear response has it: rounding of one part moves less."""
HOPEFUL = 0.5
"""Share of Δ² on the windows of the screen. Another part's rounding has none, a part of the true one about half."""
SHARE, SQUARES = 0.5, 0.7
"""Of Σ|Δ| and of ΣΔ² on all windows. A number at the edge of two narrow ones falls on either side by the rounding of fp32,
and what it moves is rounded again in the next layer: of outputs in bf16 in all layers of a testbed model 62 % and 83 % were
predicted, of one layer's keys and values 97 %. Rounding by other kernels in the same dtype predicts less than nothing."""
SHORT = 256
"""Tokens of the windows that every candidate is tried on: some hundred forwards over so many take ten seconds."""
FINALISTS = 3
AT_ONCE = 32
"""Candidates whose rows of logits are kept together."""
MOST_TRIED, MOST_OF_LARGE = 600, 90
LARGE = 20_000_000
"""Parameters, from which on a candidate costs a second."""
Evaluate = Callable[[Sequence[CaseWindow]], Evaluator]


def by_precision(
    everything: Costs,
    screen: Sequence[CaseWindow],
    evaluate: Evaluate,
    paths: Paths,
    rng: np.random.Generator,
) -> Attribution | None:
    """The part whose rounding is most of Δ; None where none is."""
    typical = float(np.nanmedian(np.abs(everything.residual(Explanation()))))
    # Rounding of a part reaches every token: where half of them are right it is something else.
    if typical > TOO_FAR or float(np.nanmedian(everything.sigmas(Explanation()))) <= AT_FLOOR:
        return None
    screen = _shortest(screen)
    best: list[tuple[float, Variant]] = []
    most = MOST_OF_LARGE if paths.model.num_parameters() > LARGE else MOST_TRIED
    candidates = islice(narrowed(paths.model), most)
    while some := list(islice(candidates, AT_ONCE)):
        costs = Costs(evaluate(screen))
        best += [(_of_squares(costs, _explanation(paths, variant)), variant) for variant in some]
        best = sorted(best, key=lambda pair: -pair[0])[:FINALISTS]
    hopeful = [variant for share, variant in best if share >= HOPEFUL]
    shares = {number: _share(everything, _explanation(paths, each)) for number, each in enumerate(hopeful)}
    number = max(shares, key=lambda each: shares[each], default=None)
    if number is None or shares[number] < SHARE:
        return None
    variant = hopeful[number]
    if _of_squares(everything, _explanation(paths, variant)) < SQUARES:
        return None
    hypothesis = Hypothesis(variant.cause, variant.message, _explanation(paths, variant), 1)
    found = attribute(everything, lambda account: [hypothesis] if account == Explanation() else [], rng)
    return found if found.selected else None


def _shortest(screen: Sequence[CaseWindow]) -> Sequence[CaseWindow]:
    """One window at least, and more as long as they are short."""
    ordered = sorted(screen, key=lambda window: len(window.prompt) + len(window.output))
    lengths = np.cumsum([len(window.prompt) + len(window.output) for window in ordered])
    return ordered[: max(1, int((lengths <= SHORT).sum()))]


def _explanation(paths: Paths, variant: Variant) -> Explanation:
    return Explanation(forward=paths.add(variant.message, variant))


def _of_squares(costs: Costs, explanation: Explanation) -> float:
    before, left = costs.residual(Explanation()), costs.residual(explanation)
    return 1 - float(np.nansum(left**2)) / max(float(np.nansum(before**2)), 1e-30)


def _share(costs: Costs, explanation: Explanation) -> float:
    before, left = costs.residual(Explanation()), costs.residual(explanation)
    return 1 - float(np.nansum(np.abs(left))) / float(np.nansum(np.abs(before)))

"""From a failed probe to named causes: pick cases, propose accounts, let the data choose.

Semantic accounts are tried first because they cost arithmetic only. Accounts that need another forward join in
where meaning alone leaves a difference above the gate, so that a wrong rotary base is not explained away by a
slightly changed temperature.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zerodrift.audit.attribute import Attribution, Costs, Propose, attribute
from zerodrift.audit.counterfactual.account import Account, Hypothesis
from zerodrift.audit.counterfactual.evaluate import Case, Evaluator
from zerodrift.audit.counterfactual.path import Variant, path_forwards, path_hypotheses, path_variants
from zerodrift.audit.counterfactual.semantic import hidden_hypotheses, told_hypotheses
from zerodrift.audit.floor import Floor
from zerodrift.audit.measure import Measurement
from zerodrift.audit.probes.parity import Gates

ROW_BYTES = 96 * 2**20
"""Logits kept while accounts are compared: 24,000 tokens of a 512-word vocabulary, 500 of a 49,152-word one."""
MOST_TOKENS = 1500


def diagnose(
    model: Any,
    measurements: Sequence[Measurement],
    floor: Floor,
    gates: Gates,
    defaults: Mapping[str, float],
    stop_ids: Sequence[int],
    rng: np.random.Generator,
) -> Attribution:
    """The account that explains the measurements best."""
    cases = choose_cases(measurements, floor, gates, model, rng)
    variants = path_variants(model)
    evaluator = Evaluator(cases, path_forwards(model, variants), stop_ids=stop_ids)
    costs = Costs(evaluator)
    return attribute(costs, _proposals(costs, variants, defaults), rng)


def choose_cases(
    measurements: Sequence[Measurement], floor: Floor, gates: Gates, model: Any, rng: np.random.Generator
) -> list[Case]:
    """Half the budget for the worst sequences, half for random ones: a rare fault must be seen, and put in place."""
    width = model.config.vocab_size * model.dtype.itemsize
    budget = min(MOST_TOKENS, max(200, ROW_BYTES // width))
    cases = [_case(item, floor, gates) for item in measurements]
    badness = [_badness(item, case) for item, case in zip(measurements, cases, strict=True)]
    worst = sorted(range(len(cases)), key=lambda i: -badness[i])
    chosen = _fill(worst, cases, budget // 2)
    others = [i for i in rng.permutation(len(cases)).tolist() if i not in chosen]
    chosen |= _fill(others, cases, budget - sum(len(cases[i].output) for i in chosen))
    return [cases[i] for i in sorted(chosen)]


def _case(item: Measurement, floor: Floor, gates: Gates) -> Case:
    completion = item.observed.completion
    sigma = floor.sigma(np.maximum(item.contracted, -100.0))
    # Below a third of the gate nothing needs a cause; without this, fp32 rounding of another framework would.
    sigma = np.hypot(sigma, gates.mean / 3)
    return Case(
        completion.prompt_token_ids, completion.token_ids, item.observed.requested, item.reported, sigma
    )


def _badness(item: Measurement, case: Case) -> float:
    """Mean |Δ| in units of σ, with wild tokens counted as fifty."""
    sizes = np.minimum(np.abs(item.delta) / case.sigma, 50.0)
    return float(sizes.mean())


def _fill(order: Iterable[int], cases: Sequence[Case], budget: int) -> set[int]:
    chosen: set[int] = set()
    for index in order:
        if budget <= 0:
            break
        chosen.add(index)
        budget -= len(cases[index].output)
    return chosen


def _proposals(costs: Costs, variants: Mapping[str, Variant], defaults: Mapping[str, float]) -> Propose:
    def propose(account: Account) -> Iterable[Hypothesis]:
        if costs.at_floor(account):
            return list(hidden_hypotheses(account, costs.total, defaults))
        semantic = list(told_hypotheses(account, costs.total, defaults))
        best = min(semantic, key=lambda hypothesis: costs.total(hypothesis.account))
        if costs.at_floor(best.account):
            return semantic
        return [*semantic, *path_hypotheses(account, variants)]

    return propose

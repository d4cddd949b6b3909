"""From a failed probe to named causes: pick cases, propose accounts, let the data choose.

Semantic accounts are tried first because they cost arithmetic only. Accounts that need another forward join in
where meaning alone leaves a difference above the gate, so that a wrong rotary base is not explained away by a
slightly changed temperature.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerodrift.audit.attribute import Attribution, Costs, Propose, attribute
from zerodrift.audit.counterfactual.account import Account, Hypothesis
from zerodrift.audit.counterfactual.bias import bias_hypotheses
from zerodrift.audit.counterfactual.context import PromptEdit, context_hypotheses, prompt_edits
from zerodrift.audit.counterfactual.evaluate import Case, Evaluator
from zerodrift.audit.counterfactual.path import (
    ROUNDINGS,
    Variant,
    path_forwards,
    path_hypotheses,
    path_variants,
)
from zerodrift.audit.counterfactual.semantic import hidden_hypotheses, told_hypotheses
from zerodrift.audit.floor import Floor, Passage, measure_floor
from zerodrift.audit.measure import Measurement
from zerodrift.audit.probes.parity import Gates
from zerodrift.core.completion import FinishReason
from zerodrift.models.model_facts import ModelFacts

ROW_BYTES = 96 * 2**20
"""Logits kept while accounts are compared: 24,000 tokens of a 512-word vocabulary, 500 of a 49,152-word one."""
MOST_TOKENS = 1000
ROUNDING_CASES = 4


class Suspect(NamedTuple):
    """What is known of the model beyond its weights."""

    model: Any
    tokenizer: Any
    facts: ModelFacts


def diagnose(
    suspect: Suspect,
    measurements: Sequence[Measurement],
    floor: Floor,
    gates: Gates,
    rng: np.random.Generator,
) -> Attribution:
    """The account that explains the measurements best."""
    model, facts = suspect.model, suspect.facts
    cases = choose_cases(measurements, floor, gates, model, rng)
    variants = path_variants(model)
    edits = prompt_edits(suspect.tokenizer, facts.bos_token_id)
    evaluator = Evaluator(
        cases,
        path_forwards(model, variants),
        contexts={name: edit.edit for name, edit in edits.items()},
        stop_ids=facts.eos_token_ids,
        roundings={dtype: partial(_rounding, model, dtype) for dtype in ROUNDINGS.values()},
    )
    costs = Costs(evaluator)
    return attribute(costs, _proposals(costs, variants, edits, facts.generation_defaults), rng)


def _rounding(model: Any, dtype: str, cases: Sequence[Case]) -> np.ndarray:
    """Rounding scale of every token in `dtype`, from the floor of a few cases."""
    passages = [Passage(case.prompt + case.output, len(case.prompt)) for case in cases[:ROUNDING_CASES]]
    floor = measure_floor(model, passages, dtype)
    return floor.sigma(np.concatenate([np.maximum(case.reported, -100.0) for case in cases]))


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
        completion.prompt_token_ids,
        completion.token_ids,
        item.observed.requested,
        item.reported,
        sigma,
        stopped=completion.finish_reason is FinishReason.STOP,
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


def _proposals(
    costs: Costs,
    variants: Mapping[str, Variant],
    edits: Mapping[str, PromptEdit],
    defaults: Mapping[str, float],
) -> Propose:
    def propose(account: Account) -> Iterable[Hypothesis]:
        if costs.at_floor(account):
            return list(hidden_hypotheses(account, costs.total, defaults))
        cheap = [
            *told_hypotheses(account, costs.total, defaults),
            *bias_hypotheses(account, costs.residual(account), costs.evaluator.tokens, costs.total),
        ]
        best = min(cheap, key=lambda hypothesis: costs.total(hypothesis.account))
        if costs.at_floor(best.account):
            return cheap
        return [*cheap, *context_hypotheses(account, edits), *path_hypotheses(account, variants)]

    return propose

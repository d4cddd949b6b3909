"""From a failed probe to named causes: pick cases, propose accounts, let the data choose.

Semantic accounts are tried first because they cost arithmetic only. Accounts that need another forward join in
where meaning alone leaves a difference above the gate, so that a wrong rotary base is not explained away by a
slightly changed temperature.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from zerodrift.audit.attribute import Attribution, Costs, attribute
from zerodrift.audit.cases import choose_cases
from zerodrift.audit.counterfactual.account import Account, Hypothesis
from zerodrift.audit.counterfactual.bias import bias_hypotheses
from zerodrift.audit.counterfactual.context import context_hypotheses, prompt_edits
from zerodrift.audit.counterfactual.evaluate import Case, Evaluator
from zerodrift.audit.counterfactual.path import (
    ROUNDINGS,
    path_forwards,
    path_hypotheses,
    path_variants,
)
from zerodrift.audit.counterfactual.semantic import Expected, hidden_hypotheses, told_hypotheses
from zerodrift.audit.floor import ROUGHLY, Floor, Passage, measure_floor
from zerodrift.audit.measure import Measurement
from zerodrift.audit.probes.parity import Gates
from zerodrift.backends import variants
from zerodrift.models.model_facts import ModelFacts

ROW_BYTES = 96 * 2**20
"""Logits kept while accounts are compared: 24,000 tokens of a 512-word vocabulary, 500 of a 49,152-word one."""
MOST_TOKENS = 1000
FEW_TOKENS = 240
"""Enough for a path: a wrong rotary base gains ten nats a token."""
ROUNDING_CASES = 2
ROUNDING_TOKENS = 32
SCOUTS = 3
"""Every prompt and path is tried on so many of the worst sequences first, …"""
MEANING_SCOUTS = 8
"""… every meaning on so many, because a parameter that acts on few tokens must be seen, …"""
SHORTLIST = 4
"""… and so many of the best go on to all: of eighty candidates, few are worth their price on every case."""


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
    """The account that explains the measurements best.

    Meaning is judged on many tokens, because it costs arithmetic only. Prompts and paths cost a forward each, and are
    judged on a few, where meaning alone does not reach the floor.
    """
    model, facts = suspect.model, suspect.facts
    width = model.config.vocab_size * torch.float32.itemsize
    many = choose_cases(measurements, floor, gates, min(MOST_TOKENS, max(200, ROW_BYTES // width)), rng)
    as_is = partial(Evaluator, forwards=path_forwards(model, {}), stop_ids=facts.eos_token_ids)
    meaning = Meaning(Costs(as_is(many)), Costs(as_is(many[:MEANING_SCOUTS])), facts.generation_defaults)
    attribution = attribute(meaning.costs, meaning.propose, rng)
    if attribution.explained_to_floor:
        return attribution
    few = choose_cases(measurements, floor, gates, FEW_TOKENS, rng)
    # Variants are told apart by differences far above fp32 rounding, and cost half as much in it as in fp64.
    narrow = model if model.dtype is torch.float32 else variants.in_dtype(model, torch.float32)
    paths = path_variants(narrow)
    edits = prompt_edits(suspect.tokenizer, facts.bos_token_id)
    evaluator = partial(
        Evaluator,
        forwards=path_forwards(narrow, paths),
        contexts={name: edit.edit for name, edit in edits.items()},
        stop_ids=facts.eos_token_ids,
        roundings={
            dtype: partial(_rounding, _coarse_floor(model, few, dtype)) for dtype in ROUNDINGS.values()
        },
    )
    everything, scouts = Costs(evaluator(few)), Costs(evaluator(few[:SCOUTS]))
    meaning = Meaning(everything, Costs(evaluator(few[:MEANING_SCOUTS])), facts.generation_defaults)

    def propose(account: Account) -> list[Hypothesis]:
        """Meanings, prompts and paths together, so that none is explained away by a poorer account of another."""
        if everything.at_floor(account):
            return meaning.propose(account)
        elsewhere = [*context_hypotheses(account, edits), *path_hypotheses(account, paths)]
        return [*meaning.propose(account), *shortlist(scouts, elsewhere)]

    return attribute(everything, propose, rng)


class Meaning(NamedTuple):
    """Proposes what needs no other forward: told where Δ is off, hidden where only the samples are."""

    costs: Costs
    scouts: Costs
    defaults: Mapping[str, float]

    def propose(self, account: Account) -> list[Hypothesis]:
        """Changes of meaning that may be worth their price."""
        costs = self.costs
        expected = Expected(costs.evaluator.cases[0].requested.temperature, self.defaults)
        if costs.at_floor(account):
            # Samples say little about each token: what they do say takes all of them.
            return list(hidden_hypotheses(account, costs.total, expected))
        return [
            *shortlist(self.scouts, list(told_hypotheses(account, self.scouts.total, expected))),
            *bias_hypotheses(account, costs.residual(account), costs.evaluator.tokens, costs.total),
        ]


def shortlist(scouts: Costs, hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses that explain the scouts best."""
    return sorted(hypotheses, key=lambda hypothesis: scouts.total(hypothesis.account))[:SHORTLIST]


def _coarse_floor(model: Any, cases: Sequence[Case], dtype: str) -> Callable[[], Floor]:
    """The floor in `dtype`, measured on a few cases when it is first asked for."""
    # Wider than the windows: a scale for each of 8 sizes of log p, from 16 tokens, would be noise.
    longest = sorted(cases, key=lambda case: len(case.output), reverse=True)[:ROUNDING_CASES]
    passages = [
        Passage(case.prompt + case.output, len(case.prompt) + max(0, len(case.output) - ROUNDING_TOKENS))
        for case in longest
    ]
    return cache(lambda: measure_floor(model, passages, dtype, ROUGHLY))


def _rounding(floor: Callable[[], Floor], cases: Sequence[Case]) -> np.ndarray:
    """Rounding scale of every token."""
    return floor().sigma(np.concatenate([np.maximum(case.reported, -100.0) for case in cases]))

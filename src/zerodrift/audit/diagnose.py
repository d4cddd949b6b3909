"""From a failed probe to named causes: pick cases, propose accounts, let the data choose.

Semantic accounts are tried first because they cost arithmetic only. Accounts that need another forward join in
where meaning alone leaves a difference above the gate, so that a wrong rotary base is not explained away by a
slightly changed temperature.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from zerodrift.audit.attribute import Attribution, Costs, attribute
from zerodrift.audit.by_precision import by_precision
from zerodrift.audit.cases import affordable, choose_cases
from zerodrift.audit.counterfactual.bias import SeenTokens, bias_hypotheses
from zerodrift.audit.counterfactual.chunks import chunk_hypotheses
from zerodrift.audit.counterfactual.context import PromptEdit, context_hypotheses, prompt_edits
from zerodrift.audit.counterfactual.evaluate import CaseWindow, Evaluator
from zerodrift.audit.counterfactual.explanation import VANILLA, Explanation, Hypothesis
from zerodrift.audit.counterfactual.path import ROUNDINGS, Paths, path_hypotheses, vanilla_forward
from zerodrift.audit.counterfactual.position import FirstOff, FitCost, first_off, position_hypotheses
from zerodrift.audit.counterfactual.semantic import ExpectedSampling, hidden_hypotheses, told_hypotheses
from zerodrift.audit.floor import ROUGHLY, Passage, measure_floor
from zerodrift.audit.measure import Measurement
from zerodrift.audit.outright import Tried, try_outright
from zerodrift.audit.response.locate import respond
from zerodrift.backends import variants
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import Gates
from zerodrift.models.model_facts import ModelFacts

WINDOW = "path/window"
ROW_BYTES = 96 * 2**20
"""Logits kept while accounts are compared: 24,000 tokens of a 512-word vocabulary, 500 of a 49,152-word one."""
MOST_TOKENS = 1000
FEW_TOKENS = 240
"""Enough for a path: a wrong rotary base gains ten nats a token."""
ROUNDING_CASES = 2
ROUNDING_TOKENS = 32
FIT_WINDOWS = 2
"""Values of positions are fitted on so many sequences, …"""
SCREEN_WINDOWS = 3
"""… every prompt and path is tried on so many first, …"""
SEMANTIC_SCREEN = 8
"""… every meaning on so many, because a parameter that acts on few tokens must be seen, …"""
SHORTLIST = 4
"""… and so many of the best go on: of eighty candidates, few are worth their price on every case."""
REFEREE_WINDOWS = 10
"""What needs a forward of its own goes on to so many of the worst sequences first, …"""
FINALISTS = 2
"""… and so many of those to all, of which most are there for the interval."""
CERTAINLY_OFF = 25.0
"""σ: healthy rows were seen up to 20 off, and one of 5 hid where a jump of positions began."""


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
    attribution = by_meaning(suspect, measurements, floor, gates, rng)
    if attribution.explained_to_floor:
        return attribution
    few = choose_cases(affordable(measurements), floor, gates, FEW_TOKENS, rng)
    # Variants are told apart by differences far above fp32 rounding, and cost half as much in it as in fp64.
    paths = Paths(model if model.dtype is torch.float32 else variants.in_dtype(model, torch.float32))
    edits = prompt_edits(suspect.tokenizer, facts.bos_token_id)
    evaluator = partial(
        Evaluator,
        forwards=paths.forwards,
        contexts={name: edit.edit for name, edit in edits.items()},
        stop_ids=facts.eos_token_ids,
        roundings={
            dtype: partial(_rounding, _coarse_floor(model, few, dtype)) for dtype in ROUNDINGS.values()
        },
    )
    everything = Costs(evaluator(few))
    screen = quickest(everything)
    by_forward = ForwardProposals(
        everything,
        Costs(evaluator(few[:REFEREE_WINDOWS])),
        Costs(evaluator(screen)),
        Costs(evaluator(screen[:FIT_WINDOWS])),
        paths,
        edits,
    )
    semantic = SemanticProposals(everything, everything, facts.generation_defaults)

    def propose(explanation: Explanation) -> list[Hypothesis]:
        """Meanings, prompts and paths together, so that none is explained away by a poorer account of another."""
        if everything.at_floor(explanation):
            return semantic.propose(explanation)
        return [*semantic.propose(explanation), *by_forward.propose(explanation)]

    attribution = attribute(everything, propose, rng)
    if attribution.by_value:
        return attribution
    return by_parts(attribution, everything, evaluator, paths, rng)


def by_parts(
    attribution: Attribution,
    everything: Costs,
    evaluate: Callable[[Sequence[CaseWindow]], Evaluator],
    paths: Paths,
    rng: np.random.Generator,
) -> Attribution:
    """Where no account predicts the numbers: one part of the model in less precision, turned a little, or changed outright."""
    screen = quickest(everything)
    rounded = by_precision(everything, screen, evaluate, paths, rng)
    if rounded is not None:
        return rounded
    outright = partial(try_outright, everything, screen, evaluate, paths, rng)
    return _inside(_with_response(attribution, paths.model, everything, rng), outright)


def _inside(attribution: Attribution, outright: Callable[[], Tried]) -> Attribution:
    """What nothing explains and no part of the model is responsible for may be gross: some hundred changes, each tried."""
    follows = attribution.response is not None and attribution.response.follows
    if (attribution.explained_to_floor and not follows) or (
        attribution.response and attribution.response.located
    ):
        return attribution
    tried = outright()
    return tried.attribution or msgspec.structs.replace(attribution, tried_outright=tried.candidates)


def by_meaning(
    suspect: Suspect,
    measurements: Sequence[Measurement],
    floor: Floor,
    gates: Gates,
    rng: np.random.Generator,
) -> Attribution:
    """The account that explains the measurements best, of those that need no other forward."""
    model, facts = suspect.model, suspect.facts
    width = model.config.vocab_size * torch.float32.itemsize
    many = choose_cases(measurements, floor, gates, min(MOST_TOKENS, max(200, ROW_BYTES // width)), rng)
    as_is = partial(Evaluator, forwards={VANILLA: vanilla_forward(model)}, stop_ids=facts.eos_token_ids)
    semantic = SemanticProposals(
        Costs(as_is(many)), Costs(as_is(many[:SEMANTIC_SCREEN])), facts.generation_defaults
    )
    return attribute(semantic.costs, semantic.propose, rng)


def _with_response(
    attribution: Attribution, model: Any, costs: Costs, rng: np.random.Generator
) -> Attribution:
    """Before rounding may take a name by its size, and where nothing has one: is it a part of the model, turned a little?"""
    answer = respond(model, costs.evaluator.cases, costs.evaluator.stop_ids, rng)
    return msgspec.structs.replace(attribution, response=answer)


class SemanticProposals(NamedTuple):
    """Proposes what needs no other forward: told where Δ is off, hidden where only the samples are."""

    costs: Costs
    screen: Costs
    defaults: Mapping[str, float]

    def propose(self, explanation: Explanation) -> list[Hypothesis]:
        """Changes of meaning that may be worth their price."""
        costs = self.costs
        expected = ExpectedSampling(costs.evaluator.cases[0].requested.temperature, self.defaults)
        if costs.at_floor(explanation):
            # Samples say little about each token: what they do say takes all of them.
            return list(hidden_hypotheses(explanation, costs.total, expected))
        return [
            *shortlist(self.screen, list(told_hypotheses(explanation, self.screen.total, expected))),
            *bias_hypotheses(explanation, seen_by(costs, explanation), expected.temperature, costs.total),
        ]


def seen_by(costs: Costs, explanation: Explanation) -> SeenTokens:
    """What an explanation leaves of each token's number, and what the token might have been."""
    evaluator = costs.evaluator
    return SeenTokens(
        costs.residual(explanation),
        evaluator.scale(explanation),
        evaluator.tokens,
        evaluator.masses(explanation),
    )


class ForwardProposals(NamedTuple):
    """Proposes what needs another forward: other prompts, other paths, other positions."""

    costs: Costs
    referee: Costs
    screen: Costs
    fit: Costs
    paths: Paths
    edits: Mapping[str, PromptEdit]

    def propose(self, explanation: Explanation) -> list[Hypothesis]:
        """The best on ever more sequences."""
        fit, seen = self.fit, self.costs
        begins = first_off(
            seen.sigmas(explanation) > CERTAINLY_OFF, seen.evaluator.positions(explanation.context)
        )
        chunked = list(
            chunk_hypotheses(explanation, self.paths, fit.at_floor, self._prompts_off(explanation))
        )
        screen = FitCost(fit.total, fit.residual, fit.at_floor)
        fitted = list(position_hypotheses(explanation, self.paths, screen, begins))
        if chunked or (fitted and fit.at_floor(fitted[-1].explanation)):
            # Every number of two windows that were off throughout: no other forward could do better. But on short sequences
            # a wider window of attention is as good as none.
            last = fitted[-1:]
            grid = path_hypotheses(explanation, self.paths.grid)
            windows = (
                [each for each in grid if each.cause == WINDOW] if last and last[0].cause == WINDOW else []
            )
            return [*chunked, *last, *windows]
        candidates = [
            *context_hypotheses(explanation, self.edits),
            *path_hypotheses(explanation, self.paths.grid),
            *fitted,
        ]
        best = shortlist(self.screen, candidates)
        # Rounding costs no forward, and must not take the place of a path: it may yet turn out to be none.
        by_size = [each for each in best if each.explanation.rounding != explanation.rounding]
        by_value = [each for each in best if each not in by_size]
        return [*by_size, *shortlist(self.referee, by_value, FINALISTS)]

    def _prompts_off(self, explanation: Explanation) -> FirstOff | None:
        """Between which lengths of prompts numbers begin to be off."""
        seen = self.costs
        lengths = np.array([len(case.prompt) for case in seen.evaluator.cases])
        return first_off(seen.sigmas(explanation) > CERTAINLY_OFF, lengths[seen.evaluator.case_ids])


def quickest(costs: Costs) -> Sequence[CaseWindow]:
    """Of the worst cases the shortest that are off throughout, for fits.

    A fit asks for a hundred forwards, and where positions are high predictions turn too fast with them for a fit to
    see its value from afar.
    """
    cases = costs.evaluator.cases[:REFEREE_WINDOWS]
    sigmas, ids = costs.sigmas(Explanation()), costs.evaluator.case_ids
    off = [case for number, case in enumerate(cases) if np.median(sigmas[ids == number]) > CERTAINLY_OFF]
    return (
        sorted(off, key=lambda case: len(case.prompt) + len(case.output))[:SCREEN_WINDOWS]
        or cases[:SCREEN_WINDOWS]
    )


def shortlist(screen: Costs, hypotheses: Sequence[Hypothesis], count: int = SHORTLIST) -> list[Hypothesis]:
    """The hypotheses that explain these windows best."""
    return sorted(hypotheses, key=lambda hypothesis: screen.total(hypothesis.explanation))[:count]


def _coarse_floor(model: Any, cases: Sequence[CaseWindow], dtype: str) -> Callable[[], Floor]:
    """The floor in `dtype`, measured on a few cases when it is first asked for."""
    # Wider than the windows: a scale for each of 8 sizes of log p, from 16 tokens, would be noise.
    longest = sorted(cases, key=lambda case: len(case.output), reverse=True)[:ROUNDING_CASES]
    passages = [
        Passage(case.prompt + case.output, len(case.prompt) + max(0, len(case.output) - ROUNDING_TOKENS))
        for case in longest
    ]
    return cache(lambda: measure_floor(model, passages, dtype, ROUGHLY))


def _rounding(floor: Callable[[], Floor], cases: Sequence[CaseWindow]) -> np.ndarray:
    """Rounding scale of every token."""
    return floor().sigma(np.concatenate([case.reported for case in cases]))

"""Do scores of given tokens mean something else: a neighbour's number, another temperature, another base?

Asked where they are wrong, by the explanations that parity has. Given tokens were not drawn by the engine, so only the
numbers speak, and nothing is said that does not bring every one of them to the floor.
"""

from collections.abc import Sequence
from math import log

import numpy as np

from zerodrift.audit.attribute import AT_FLOOR, Channels, Costs, attribute
from zerodrift.audit.counterfactual.evaluate import CaseWindow, Evaluator
from zerodrift.audit.counterfactual.explanation import VANILLA, Explanation, Hypothesis
from zerodrift.audit.counterfactual.path import vanilla_forward
from zerodrift.audit.counterfactual.semantic import ExpectedSampling, told_hypotheses
from zerodrift.audit.diagnose import MOST_TOKENS, ROW_BYTES
from zerodrift.audit.probes.result import found
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.request import SamplingParams
from zerodrift.drift.gates import Gates
from zerodrift.records.verdict import CauseFound, Probe
from zerodrift.stats.arrays import Floats

BASES = {2: "log2", 10: "log10"}
RAW = SamplingParams(temperature=1.0)
"""What prompt scores are of, whatever samples are drawn with."""
SEQUENCES = 8
FLOAT = 4
"""Bytes of a logit."""


class _NumbersAlone(Costs):
    """Costs of accounts of numbers whose tokens somebody else drew."""

    def channels(self, explanation: Explanation) -> Channels:
        """Without the likelihood of the tokens."""
        return Channels(super().channels(explanation).reported, 0.0)


def score_meaning(
    reference: ReferenceBackend,
    gates: Gates,
    engine: str,
    sequences: Sequence[tuple[int, ...]],
    told: Sequence[Floats],
) -> CauseFound | None:
    """What `told`, scores of the last tokens of each sequence, are instead; None where nothing known predicts them."""
    budget = min(MOST_TOKENS, max(200, ROW_BYTES // (FLOAT * reference.facts.vocab_size)))
    most = max(2, budget // min(SEQUENCES, len(sequences)))
    cases = [_window(ids, row[-most:], gates) for ids, row in zip(sequences, told, strict=True)][:SEQUENCES]
    costs = _NumbersAlone(
        Evaluator(cases, {VANILLA: vanilla_forward(reference.model)}, stop_ids=reference.facts.eos_token_ids)
    )
    if (name := _in_another_base(costs)) is not None:
        return _found("semantic/notation", f"scores are {name}, not natural logarithms", 1.0, engine)

    def propose(explanation: Explanation) -> list[Hypothesis]:
        if costs.at_floor(explanation):
            return []
        return list(told_hypotheses(explanation, costs.total, ExpectedSampling()))

    attribution = attribute(costs, propose, np.random.default_rng(0))
    if not attribution.explained_to_floor or len(attribution.selected) != 1:
        return None
    (selected,) = attribution.selected
    return _found(selected.cause, selected.message, selected.explained, engine)


def _window(ids: tuple[int, ...], row: Floats, gates: Gates) -> CaseWindow:
    begin = len(ids) - len(row)
    return CaseWindow(ids[:begin], ids[begin:], RAW, row, np.full(len(row), gates.mean / 3))


def _in_another_base(costs: Costs) -> str | None:
    right, told = costs.prediction(Explanation()).reported, costs.evaluator.reported
    scale = costs.evaluator.scale(Explanation())
    for base, name in BASES.items():
        if float(np.quantile(np.abs(told * log(base) - right) / scale, 0.9)) <= AT_FLOOR:
            return name
    return None


def _found(cause: str, message: str, explained: float, engine: str) -> CauseFound:
    evidence = f"in scores of given tokens (prompt logprobs), and not in those of decoded ones: {message}"
    return found(cause, engine, Probe.GIVEN_TOKENS, evidence, explained=explained, gating=True)

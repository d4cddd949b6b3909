"""Does each request of a batch get its own sampling parameters? Six at once, of which no two ask for the same.

An audit asks for one set of parameters throughout, and a batch whose rows are sampled and reported by a neighbour's looks
healthy then. Here every reported number and every draw is held against the request's own parameters; of one that is off
those of the others are tried, and it is asked again alone: right alone, it is the company's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zerodrift.audit.checked_calls import generated
from zerodrift.audit.measure import EDGE
from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged, with_fix
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion, LogprobKind
from zerodrift.core.errors import CapabilityMissing, EngineRefused, InvalidSampling
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift.sampling import SAMPLING_ALPHA
from zerodrift.records.evidence import MixedEvidence
from zerodrift.records.verdict import Outcome, Probe
from zerodrift.sampler.processing import histories, processed_logprobs
from zerodrift.stats.arrays import Floats

NAME = Probe.MIXED
CAUSE = "path/batch-variance"
TOKENS, LONGEST = 24, 32
LARGE = 10.0
"""A request whose median number is so many bands off is not the one that was asked for, as for single parameters."""
LEAST = -30.0
"""Logprob of what the parameters exclude: much, and finite."""
MOST_WON = 3.0
"""Nats that one draw may win for the parameters of another: of healthy engines in bf16 one in twelve drew a token that its own left out."""
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.5},
    {"temperature": 1.5},
    {"top_p": 0.6},
    {"temperature": 0.8, "top_k": 12},
    {"logit_bias": {}},
    {"temperature": 1.2, "top_p": 0.85},
)
"""What one is asked for would be wrong by a tenth of a nat and more by any other. The bias is on tokens of its own prompt."""
ONE_BY_ONE: tuple[dict[str, Any], ...] = tuple({"temperature": t} for t in (0.5, 0.7, 0.9, 1.1, 1.3, 1.5))
"""Where an engine does not take all of those."""
BIAS = 2.0


@dataclass(frozen=True)
class MixedBatch:
    """One call, and what it is held against."""

    engine: Backend
    reference: ReferenceBackend
    requests: Sequence[Request]
    band: float
    """How far rounding may move a number."""

    def ask(self) -> ProbeResult:
        """All together; what is off once more alone."""
        try:
            requests = self._requests(ASKED)
            answers = generated(self.engine, requests)
        except (EngineRefused, CapabilityMissing, InvalidSampling):
            requests = self._requests(ONE_BY_ONE)
            answers = generated(self.engine, requests)
        if not all(answer.completions for answer in answers):
            return not_judged(NAME, "the engine gave no usable sample for a request of this probe")
        each = [answer.completions[0] for answer in answers]
        judged = [
            _Judged(one, [other.sampling for other in requests], number, self)
            for number, one in enumerate(each)
        ]
        off = [one for one in judged if one.off]
        evidence = MixedEvidence(requests=len(judged), off=len(off), others=sum(one.anothers for one in off))
        if not off:
            message = f"{len(judged)} requests in one call, each by its own parameters"
            return answered(NAME, Outcome.PASS, message, evidence)
        alone = [generated(self.engine, [requests[one.number]])[0].completions for one in off]
        right = [
            bool(group) and not _Judged(group[0], one.asked, one.number, self).off
            for one, group in zip(off, alone, strict=True)
        ]
        message = f"of {len(judged)} requests with parameters of their own in one call {len(off)} {_how(off)}"
        if not any(right):
            # Whatever is not honoured at all is for the probe of single parameters to say.
            message += "; alone they are no better"
            return answered(NAME, Outcome.INCONCLUSIVE, message, evidence)
        share = len(off) / len(judged)
        cause = found(
            CAUSE, self.engine.name, NAME, f"{message}; alone they are right", explained=share, gating=True
        )
        cause = with_fix(cause, "sample every row of a batch by the parameters of its own request")
        return answered(NAME, Outcome.FAIL, message, evidence, causes=(cause,))

    def _requests(self, asked: Sequence[dict[str, Any]]) -> list[Request]:
        found = []
        for number, parameters in enumerate(asked):
            request = self.requests[number % len(self.requests)]
            ids = request.prompt.token_ids[:LONGEST]
            own = parameters | (
                {"logit_bias": dict.fromkeys(ids, BIAS)} if "logit_bias" in parameters else {}
            )
            sampling = SamplingParams(
                **own, max_tokens=TOKENS, ignore_eos=True, seed=request.sampling.seed, logprobs=0
            )
            found.append(Request(Prompt(ids), sampling))
        return found

    def logprobs(self, one: Completion, asked: Sequence[SamplingParams]) -> list[Floats]:
        """Of its tokens, [account, token] by each of several sets of parameters, and at last by none: where some tokens are left out
        rounding decides which, so that there are three accounts of what is left."""
        (logits_TV,) = self.reference.teacher.logits([one.sequence], [len(one.prompt_token_ids)])
        past = histories(one.prompt_token_ids, one.token_ids)
        tokens = torch.tensor(one.token_ids)[:, None]
        stops = self.reference.facts.eos_token_ids
        slack = max(EDGE, self.band)

        def told(params: SamplingParams) -> Floats:
            slacks = (0.0, slack, -slack) if params.truncates else (0.0,)
            rows = [processed_logprobs(logits_TV.double(), params, past, stops, slack=by) for by in slacks]
            return np.stack([np.maximum(row.gather(-1, tokens)[:, 0].numpy(), LEAST) for row in rows])

        return [*(told(params) for params in asked), told(SamplingParams())]


class _Judged:
    """One answer, by its own parameters and by those of the others."""

    def __init__(
        self, one: Completion, asked: Sequence[SamplingParams], number: int, held: MixedBatch
    ) -> None:
        self.asked, self.number = asked, number
        *accounts, raw = held.logprobs(one, asked)
        told, band = np.array(one.logprobs), LARGE * held.band
        near = [_distance(each, told) <= band for each in accounts]
        # An engine may report the model's own.
        own_logprobs = one.kind is not LogprobKind.PROCESSED and _distance(raw, told) <= band
        self.off_numbers = not near[number] and not own_logprobs
        self.anothers = self.off_numbers and any(near)
        own = accounts[number].max(axis=0)
        won = [
            0.0 if place == number else float(np.minimum(each[0] - own, MOST_WON).sum())
            for place, each in enumerate(accounts)
        ]
        self.off_draws = float(np.logaddexp.reduce(won)) - np.log(len(won)) > -np.log(
            SAMPLING_ALPHA / len(won)
        )

    @property
    def off(self) -> bool:
        return self.off_numbers or self.off_draws


def _distance(accounts: Floats, told: Floats) -> float:
    """The median over tokens, each by the account that is nearest."""
    return float(np.median(np.abs(accounts - told).min(axis=0)))


def _how(off: Sequence[_Judged]) -> str:
    others = sum(one.anothers for one in off)
    if others:
        return f"are reported by those of another request ({others}) or of none"
    if any(one.off_numbers for one in off):
        return "are reported by others than asked for"
    return "are drawn by those of another request"

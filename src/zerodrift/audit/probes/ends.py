"""Where an end is likely, does it come as often as it is due? Prefixes are sought by the reference, and asked of the engine.

Cheap: the reference has said of every rollout how likely an end was at each place; it scores a few finished exchanges, and
where none of these will do, prefixes of one token. If a model never ends by itself, a bias on its stop token is asked for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from zerodrift.audit.checked_calls import drawn
from zerodrift.audit.measure import Measurement
from zerodrift.audit.plan import draws_of_one
from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged
from zerodrift.audit.prompts import before_ends
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion, FinishReason
from zerodrift.core.errors import CapabilityMissing, EngineRefused
from zerodrift.core.request import Request, SamplingParams
from zerodrift.drift.ends import PREFIXES, Ends, count_ends, draws_needed, informative
from zerodrift.drift.sampling import SAMPLING_ALPHA, SAMPLING_DOUBT
from zerodrift.records.evidence import EndsEvidence
from zerodrift.records.verdict import Outcome, Probe
from zerodrift.sampler.processing import TokenHistory, processed_logprobs
from zerodrift.stats.arrays import Floats

NAME = Probe.ENDS
LONGEST = 64
"""Tokens of a prefix: each is asked in dozens of samples."""
FROM_ROLLOUTS = 8
STEP = 8
"""Tokens of a prefix that cost as much as the draw itself."""
SINGLE = 256
"""Prefixes of one token. Of untrained models the likeliest end of so many has 0.1 to 0.6."""
BIASED_DRAWS = 192
"""Of each of four prefixes, where a bias makes an end as likely as not: half of its odds are seen with 600."""
FEWEST_ENDS = 5
"""Drawn stop tokens whose numbers are judged."""
FAR = 4.0
"""Bands: nine in ten tokens of a sound engine are within one."""
Prefix = tuple[int, ...]


class EndsAsked(NamedTuple):
    """Prefixes, how likely an end is behind each, and how often each is drawn from."""

    prefixes: list[Prefix]
    masses: Floats
    draws: int
    sampling: SamplingParams
    by_itself: "EndsAsked | None" = None
    """The same without a bias."""


class _Drawn(NamedTuple):
    """How often an end came, and how far its numbers are off."""

    ends: Ends
    gaps: Floats


@dataclass(frozen=True)
class LikelyEnds:
    """The search, and the draws."""

    engine: Backend
    reference: ReferenceBackend
    sampling: SamplingParams
    """Of the run: ends are asked as it asks."""
    measurements: Sequence[Measurement]
    band: float
    """How far rounding may move a logit."""
    seed: int
    seeded: bool = True

    def ask(self) -> ProbeResult:
        """Draw, and count."""
        if not self.stops:
            return not_judged(NAME, "the model has no stop token")
        if self.sampling.greedy:
            return not_judged(NAME, "nothing is drawn at temperature 0")
        asked = self.plan()
        try:
            ends = self._drawn(asked)
        except (EngineRefused, CapabilityMissing):
            if asked.by_itself is None:
                raise
            # It takes no bias. What little can be seen without is said in the power line.
            asked = asked.by_itself
            ends = self._drawn(asked)
        if ends is None:
            return not_judged(NAME, "no draw came back")
        return self._with_numbers(self._judged(ends.ends, asked), ends.gaps)

    def _drawn(self, asked: EndsAsked) -> "_Drawn | None":
        seed = self.seed if self.seeded else None
        requests = draws_of_one(asked.prefixes, asked.sampling, asked.draws, seed)
        likely = dict(zip(asked.prefixes, asked.masses.tolist(), strict=True))
        pairs = drawn(self.engine, requests)
        if not pairs:
            return None
        masses = [likely[request.prompt.token_ids] for request, _ in pairs]
        stopped = [self._stopped(completion) for _, completion in pairs]
        ends = count_ends(np.array(masses), np.array(stopped), self.band, SAMPLING_ALPHA)
        return _Drawn(ends, self._gaps(pairs, asked))

    def _gaps(self, pairs: Sequence[tuple[Request, Completion]], asked: EndsAsked) -> Floats:
        """By how much the numbers of drawn stop tokens are off. With a bias none is judged: the run asks for none, and
        engines may report what was before it."""
        if asked.sampling.logit_bias:
            return np.zeros(0)
        rows = dict(zip(asked.prefixes, self._of_stops(asked.prefixes, asked.sampling), strict=True))
        return np.array(
            [
                abs(completion.logprobs[0] - rows[request.prompt.token_ids][completion.token_ids[0]])
                for request, completion in pairs
                if completion.logprobs and completion.token_ids[0] in self.stops
            ]
        )

    def _with_numbers(self, result: ProbeResult, gaps: Floats) -> ProbeResult:
        """An end comes once in an output, and of outputs that mostly reach their limit parity sees it too rarely."""
        if len(gaps) < FEWEST_ENDS or not float(np.median(gaps)) > FAR * self.band:
            return result
        message = (
            f"{result.message}; the logprob reported of a stop token is off by {np.median(gaps):.2g} nats at the median "
            f"of {len(gaps)} draws, and that of other tokens is right"
        )
        cause = found("semantic/eos", self.engine.name, NAME, message)
        return msgspec.structs.replace(
            result, status=Outcome.FAIL, message=message, causes=(cause, *result.causes)
        )

    def plan(self) -> EndsAsked:
        """The prefixes that tell most, and draws enough to see an end with half of its odds."""
        best: list[tuple[Prefix, float]] = []
        for more in (self._written(), self._single()):
            best = self._best([*best, *self._scored(list(more), self.sampling)])
            # Several prefixes if they will do: what is wrong with one may be right elsewhere.
            for some in (best, best[: PREFIXES // 2], best[:1]):
                masses = np.array([mass for _, mass in some])
                draws = draws_needed(masses, self.band, SAMPLING_ALPHA)
                if draws is not None:
                    return EndsAsked([prefix for prefix, _ in some], masses, draws, self.sampling)
        return self._biased(best)

    def _written(self) -> Iterator[Prefix]:
        yield from self._of_rollouts()
        for ids in before_ends(self.reference.tokenizer, self.stops):
            if len(ids) < min(self.engine.max_model_len, self.reference.facts.context_length):
                yield ids

    def _of_rollouts(self) -> list[Prefix]:
        """Those of the audit's own sequences after which an end was likeliest, which is known already."""
        places = [
            (float(item.masses.stop[at]), number, at)
            for number, item in enumerate(self.measurements)
            for at in range(len(item.masses.stop))
            if len(item.observed.completion.prompt_token_ids) + at <= LONGEST
        ]
        chosen = sorted(places, reverse=True)[:FROM_ROLLOUTS]
        completions = [self.measurements[number].observed.completion for _, number, _ in chosen]
        return [
            (*each.prompt_token_ids, *each.token_ids[:at])
            for each, (_, _, at) in zip(completions, chosen, strict=True)
        ]

    def _single(self) -> Iterator[Prefix]:
        size = self.reference.facts.vocab_size
        rng = np.random.default_rng(self.seed)
        yield from ((token,) for token in rng.permutation(size)[:SINGLE].tolist() if token not in self.stops)

    def _scored(self, prefixes: list[Prefix], sampling: SamplingParams) -> list[tuple[Prefix, float]]:
        """How likely the engine is to end behind each, if it is right."""
        unique = list(dict.fromkeys(prefixes))
        told = self._of_stops(unique, sampling)
        return [(ids, sum(map(math.exp, each.values()))) for ids, each in zip(unique, told, strict=True)]

    def _of_stops(self, prefixes: Sequence[Prefix], sampling: SamplingParams) -> list[dict[int, float]]:
        """The logprob of each stop token behind each prefix."""
        # A teacher predicts the tokens that it is given: one more, whose own logits are not asked for.
        rows = self.reference.teacher.logits([(*ids, 0) for ids in prefixes], [len(ids) for ids in prefixes])
        asked = msgspec.structs.replace(sampling, min_tokens=0, ignore_eos=False)
        told = []
        for ids, logits_1V in zip(prefixes, rows, strict=True):
            drawn_1V = processed_logprobs(logits_1V.double(), asked, [TokenHistory(ids, ())], self.stops)
            told.append(dict(zip(self.stops, drawn_1V[0, torch.tensor(self.stops)].tolist(), strict=True)))
        return told

    def _best(self, scored: Sequence[tuple[Prefix, float]]) -> list[tuple[Prefix, float]]:
        gain = informative(np.array([mass for _, mass in scored]))
        # By what they cost: a long prefix is read again for every draw.
        gain /= np.array([len(ids) + STEP for ids, _ in scored])
        return [scored[place] for place in np.argsort(-gain, kind="stable")[:PREFIXES]]

    def _biased(self, best: Sequence[tuple[Prefix, float]]) -> EndsAsked:
        """With a bias that makes an end as likely as anything else, on average over the prefixes."""
        prefixes, masses = [prefix for prefix, _ in best], np.array([mass for _, mass in best])
        by_itself = EndsAsked(prefixes, masses, BIASED_DRAWS, self.sampling)
        odds = [mass / (1 - mass) for _, mass in best if 0 < mass < 1]
        if not odds or self.sampling.truncates or self.sampling.logit_bias:
            return by_itself
        # A bias is divided by the temperature, as every logit is.
        bias = round(-float(np.mean(np.log(odds))) * self.sampling.temperature, 2)
        bias = min(100.0, bias)
        sampling = msgspec.structs.replace(self.sampling, logit_bias=dict.fromkeys(self.stops, bias))
        masses = np.array([mass for _, mass in self._scored(prefixes, sampling)])
        return EndsAsked(prefixes, masses, BIASED_DRAWS, sampling, by_itself)

    @property
    def stops(self) -> list[int]:
        """What ends an output of the run."""
        size = self.reference.facts.vocab_size
        stops = {*self.reference.facts.eos_token_ids, *self.sampling.stop_token_ids}
        return sorted(each for each in stops if each < size)

    def _stopped(self, completion: Completion) -> bool:
        if not completion.token_ids:
            return completion.finish_reason is FinishReason.STOP
        return completion.token_ids[0] in self.stops

    def _judged(self, ends: Ends, asked: EndsAsked) -> ProbeResult:
        bias = max(asked.sampling.logit_bias.values(), default=None)
        power = ends.power
        if bias is not None:
            power = msgspec.structs.replace(
                power, message=f"{power.message}, with a bias of {bias:+.3g} on it"
            )
        evidence = EndsEvidence(
            prefixes=len(asked.prefixes),
            draws=ends.draws,
            drawn=ends.drawn,
            due=round(ends.due, 3),
            p=ends.p_value,
            bias=bias,
            power=(power,),
        )
        message = (
            f"behind {len(asked.prefixes)} prefixes a stop token came {ends.drawn:,} times where {ends.due:,.1f} were due, "
            f"in {ends.draws:,} draws"
        )
        if ends.p_value < SAMPLING_ALPHA:
            cause = found("semantic/sampling-bias", self.engine.name, NAME, message)
            return answered(NAME, Outcome.FAIL, message, evidence, causes=(cause,))
        if ends.p_value < SAMPLING_DOUBT:
            message += (
                f", which chance does once in {1 / ends.p_value:,.0f} runs: audit again with another seed"
            )
            return answered(NAME, Outcome.INCONCLUSIVE, message, evidence, required=True)
        return answered(NAME, Outcome.PASS, f"{message} (p = {ends.p_value:.2g})", evidence)

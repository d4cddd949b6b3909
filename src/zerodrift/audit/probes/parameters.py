"""Is each sampling parameter honoured as it is asked, those that this run does not use among them?

A few prompts are asked with one parameter at a time: single tokens, or a few where a penalty looks at the output. What is not
honoured fails a run that uses it; of any other run it is told and does not gate. Seeds are for `repeat` to judge.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from zerodrift.audit.checked_calls import drawn
from zerodrift.audit.measure import EDGE, Measurement
from zerodrift.audit.plan import draws_of_one
from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion, LogprobKind
from zerodrift.core.errors import BadAnswer, CapabilityMissing, EngineRefused, InvalidSampling
from zerodrift.core.request import SamplingParams
from zerodrift.drift.honoured import Honoured, Value, bets
from zerodrift.drift.sampling import SAMPLING_ALPHA
from zerodrift.records.evidence import ParametersEvidence, Power
from zerodrift.records.verdict import CauseFound, Outcome, Probe
from zerodrift.sampler.processing import histories, processed_logprobs
from zerodrift.stats.arrays import Floats

NAME = Probe.PARAMETERS
PROMPTS, LONGEST = 4, 32
DRAWS = 64
"""Single tokens of each prompt: with 256 together a top-p of 0.8 that is in truth 0.72 is seen."""
PENALISED, TOKENS = 8, 8
"""Samples of each prompt and tokens of each, where a penalty looks at what was drawn before."""
LARGE = 10.0
"""Reported numbers so many bands away from those asked for are of another distribution."""


class Parameter(NamedTuple):
    """A value that is asked for, and those that may be in force in its place; the first is none at all."""

    name: str
    asked: float
    others: tuple[float, ...]
    cause: str = "semantic/sampling-bias"

    @property
    def penalty(self) -> bool:
        """Whether it is about tokens that came before."""
        return self.name.endswith("penalty")


PARAMETERS = (
    Parameter("temperature", 0.6, (1.0, 0.05, 0.45, 0.54, 0.66, 0.75), "semantic/temperature"),
    Parameter("top_p", 0.8, (1.0, 0.4, 0.64, 0.72, 0.76, 0.9)),
    Parameter("top_k", 8, (0, 4, 6, 7, 10, 16)),
    Parameter("min_p", 0.1, (0.0, 0.05, 0.2, 0.4)),
    # Those below one and below zero favour what was seen, which is rare where it is punished.
    Parameter("repetition_penalty", 0.7, (1.0, 0.5, 0.85, 1.4)),
    Parameter("presence_penalty", -2.0, (0.0, -1.0, 2.0)),
    Parameter("frequency_penalty", -2.0, (0.0, -1.0, 2.0)),
)
HOTTER = Parameter("temperature", 1.4, (1.0, 0.6, 1.12, 1.26, 1.54, 1.75), "semantic/temperature")
"""Where 0.6 is what the run itself asks for."""
LEVEL = SAMPLING_ALPHA / len(PARAMETERS)


class DrawnRow(NamedTuple):
    """A row of logits, what came before it, and the tokens that were drawn from it, with their reported logprobs."""

    logits_1V: torch.Tensor
    prompt: tuple[int, ...]
    before: tuple[int, ...]
    tokens: tuple[int, ...]
    reported: tuple[float, ...]


@dataclass(frozen=True)
class AskParameters:
    """One parameter after the other."""

    engine: Backend
    reference: ReferenceBackend
    sampling: SamplingParams
    """Of the run."""
    measurements: Sequence[Measurement]
    band: float
    """How far rounding may move a logit."""
    seed: int | None
    parameters: Sequence[Parameter] = PARAMETERS

    def ask(self) -> ProbeResult:
        """Each that the engine takes."""
        prefixes = self._prefixes()
        if not prefixes:
            return not_judged(NAME, f"no prompt is as short as {LONGEST} tokens")
        judged: list[Honoured] = []
        refused: list[str] = []
        for parameter in self._parameters():
            try:
                judged.append(self._judge(parameter, prefixes))
            except (EngineRefused, CapabilityMissing, InvalidSampling):
                refused.append(parameter.name)
        if not judged:
            return not_judged(NAME, "the engine takes none of them")
        return self._result(judged, refused)

    def _parameters(self) -> list[Parameter]:
        return [
            HOTTER if each.name == "temperature" and self.sampling.temperature == each.asked else each
            for each in self.parameters
        ]

    def _prefixes(self) -> list[tuple[int, ...]]:
        """Short prompts of the audit whose first token is the most open: what is certain shows no parameter."""
        open_first = sorted(self.measurements, key=lambda item: -float(item.entropy[0]))
        prompts = [item.observed.completion.prompt_token_ids for item in open_first]
        room = min(self.engine.max_model_len, self.reference.facts.context_length) - TOKENS
        short = [ids for ids in dict.fromkeys(prompts) if len(ids) <= min(LONGEST, room)]
        return short[:PROMPTS]

    def _judge(self, parameter: Parameter, prefixes: Sequence[tuple[int, ...]]) -> Honoured:
        sampling = _with(parameter.name, parameter.asked)
        draws, tokens = (PENALISED, TOKENS) if parameter.penalty else (DRAWS, 1)
        requests = [
            msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, max_tokens=tokens))
            for each in draws_of_one(prefixes, sampling, draws, self.seed)
        ]
        completions = [one for _, one in drawn(self.engine, requests) if one.token_ids]
        if not completions:
            raise BadAnswer(
                f"no sample came back that was asked for with {parameter.name}={parameter.asked:g}"
            )
        rows = self._in_turn(completions) if parameter.penalty else self._together(completions)
        return _counted(parameter, rows, self._stops, self.band, processed=_processed(completions))

    def _together(self, completions: Sequence[Completion]) -> Iterator[DrawnRow]:
        """Single tokens: one row of logits for all draws of a prompt."""
        prompts = list(dict.fromkeys(one.prompt_token_ids for one in completions))
        rows = self.reference.teacher.logits([(*ids, 0) for ids in prompts], [len(ids) for ids in prompts])
        for ids, logits_1V in zip(prompts, rows, strict=True):
            own = [one for one in completions if one.prompt_token_ids == ids]
            tokens, told = tuple(one.token_ids[0] for one in own), tuple(one.logprobs[0] for one in own)
            yield DrawnRow(logits_1V, ids, (), tokens, told)

    def _in_turn(self, completions: Sequence[Completion]) -> Iterator[DrawnRow]:
        sequences = [one.sequence for one in completions]
        starts = [len(one.prompt_token_ids) for one in completions]
        for one, logits_TV in zip(completions, self.reference.teacher.logits(sequences, starts), strict=True):
            for place, token in enumerate(one.token_ids):
                yield DrawnRow(
                    logits_TV[place : place + 1],
                    one.prompt_token_ids,
                    one.token_ids[:place],
                    (token,),
                    (one.logprobs[place],),
                )

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(self.reference.facts.eos_token_ids)

    def _result(self, judged: Sequence[Honoured], refused: Sequence[str]) -> ProbeResult:
        wrong = [each for each in judged if not each.right(LEVEL)]
        evidence = ParametersEvidence(
            asked=", ".join(each.name for each in judged),
            refused=", ".join(refused),
            wrong=", ".join(each.name for each in wrong),
            draws=sum(each.draws for each in judged),
            power=(_power(judged, refused),),
        )
        left = f"; not taken by the engine: {', '.join(refused)}" if refused else ""
        if not wrong:
            return answered(NAME, Outcome.PASS, _honoured(judged) + left, evidence)
        causes = tuple(self._cause(each) for each in wrong)
        gating = any(cause.gating for cause in causes)
        message = "; ".join(cause.evidence for cause in causes) + left
        return answered(NAME, Outcome.FAIL if gating else Outcome.PASS, message, evidence, causes=causes)

    def _cause(self, wrong: Honoured) -> CauseFound:
        used = getattr(self.sampling, wrong.name) != getattr(SamplingParams(), wrong.name)
        message = wrong.message(LEVEL) + ("" if used else "; this run does not use it")
        (cause,) = {each.cause for each in PARAMETERS if each.name == wrong.name}
        if not wrong.off:
            # Bets are on values of one parameter, and won as well where something else draws: rare tokens that are never
            # drawn look colder. That draws and numbers part is what is known.
            cause = "semantic/sampling-bias"
        return found(cause, self.engine.name, NAME, message, gating=used)


def _honoured(judged: Sequence[Honoured]) -> str:
    """Only what would have been seen to be another value is called honoured."""
    seen = [each.name for each in judged if each.nearest_seen(LEVEL)]
    unseen = [each.name for each in judged if not each.nearest_seen(LEVEL)]
    if not seen:
        return f"none could be told from another value on these prompts: {', '.join(unseen)}"
    told = f"honoured as asked: {', '.join(seen)}"
    return f"{told}; taken, and another value would not be seen: {', '.join(unseen)}" if unseen else told


def _processed(completions: Sequence[Completion]) -> bool:
    return all(one.kind is LogprobKind.PROCESSED for one in completions)


def _counted(
    parameter: Parameter, rows: Iterator[DrawnRow], stops: Sequence[int], band: float, *, processed: bool
) -> Honoured:
    """Every draw as a bet on each of the other values."""
    total_3A = np.zeros((3, len(parameter.others)))
    far: list[float] = []
    limits: list[float] = []
    draws = 0
    for row in rows:
        asked_V = _distribution(row, parameter.name, parameter.asked, stops)
        others_AV = np.stack([_distribution(row, parameter.name, each, stops) for each in parameter.others])
        epsilon = min(0.5, band + _edge(row, parameter, stops, asked_V, max(EDGE, band)))
        won = bets(asked_V, others_AV, epsilon)
        count, tokens = len(row.tokens), np.array(row.tokens)
        total_3A[0] += won.log_e_AV[:, tokens].sum(axis=1)
        total_3A[1] += count * won.expected_A
        total_3A[2] += count * won.variance_A
        draws += count
        if processed:
            far += _distances(row, asked_V, tokens)
            limits += [LARGE * band + 2 * epsilon] * count
    values = tuple(
        Value(value, *map(float, column)) for value, column in zip(parameter.others, total_3A.T, strict=True)
    )
    return Honoured(parameter.name, parameter.asked, draws, values, _beyond(far, limits))


def _distances(row: DrawnRow, asked_V: Floats, tokens: Any) -> list[float]:
    """From the reported numbers to those asked for, or to the model's own: an engine may report either."""
    raw_V = torch.log_softmax(row.logits_1V.double(), dim=-1)[0].numpy()
    with np.errstate(divide="ignore"):
        wanted = np.abs(np.log(asked_V[tokens]) - np.array(row.reported))
    own = np.abs(raw_V[tokens] - np.array(row.reported))
    return [float(each) for each in np.minimum(wanted, own)]


def _beyond(far: Sequence[float], limits: Sequence[float]) -> float:
    """The median, where more than half of the numbers are further away than rounding and edges explain."""
    beyond = [distance for distance, limit in zip(far, limits, strict=True) if distance > limit]
    return float(np.median(far)) if 2 * len(beyond) > len(far) else 0.0


def _edge(row: DrawnRow, parameter: Parameter, stops: Sequence[int], asked_V: Floats, slack: float) -> float:
    """How far apart truncated distributions are whose edge rounding moved."""
    if parameter.name not in ("top_p", "top_k", "min_p"):
        return 0.0
    moved = [_distribution(row, parameter.name, parameter.asked, stops, by) for by in (slack, -slack)]
    return max(float(np.abs(asked_V - each_V).sum()) / 2 for each_V in moved)


def _distribution(row: DrawnRow, name: str, value: float, stops: Sequence[int], slack: float = 0.0) -> Floats:
    params = _with(name, value)
    past = histories(row.prompt, (*row.before, 0), len(row.before))
    logprobs_1V = processed_logprobs(row.logits_1V.double(), params, past, stops, slack=slack)
    probs: Floats = logprobs_1V[0].exp().numpy()
    return probs


def _with(name: str, value: float) -> SamplingParams:
    """The model's own distribution, but for one parameter."""
    own: dict[str, Any] = {name: value}
    return SamplingParams(**own)


def _power(judged: Sequence[Honoured], refused: Sequence[str]) -> Power:
    """What a PASS says of parameters: the nearest other value of each that would have been seen."""
    nearest = {each.name: (each, each.nearest_seen(LEVEL)) for each in judged}
    seen = [f"{name} {one.asked:g} taken as {at.value:g}" for name, (one, at) in nearest.items() if at]
    unseen = [name for name, (_, at) in nearest.items() if at is None]
    message = f"sampling parameters: {', '.join(seen) or 'none would be seen'}"
    message += f"; would not be seen: {', '.join(unseen)}" if unseen and seen else ""
    message += f"; not asked: {', '.join(refused)}" if refused else ""
    return Power(name="parameters", message=message, seen_from=len(seen) / (len(judged) + len(refused)))

"""The audit from first question to verdict: every probe, in order, each once.

Everything that decides is elsewhere; this file says what happens when. An engine that dies or answers nonsense ends
a probe, not the audit: what could not be judged is said so, and the run directory can be resumed.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.audit.by_split import nameless, with_split
from zerodrift.audit.checked_calls import generated
from zerodrift.audit.counterfactual.binding import find_misbound
from zerodrift.audit.counterfactual.boundary import Further, Gathered, parted_by
from zerodrift.audit.counterfactual.path import not_asked
from zerodrift.audit.counterfactual.same_model import find_unrelated
from zerodrift.audit.counterfactual.served import find_served
from zerodrift.audit.decide import Circumstances, Decision, decide
from zerodrift.audit.diagnose import Suspect, diagnose
from zerodrift.audit.explain import attributed, by_samples_alone
from zerodrift.audit.failure_replay import FailureReplay
from zerodrift.audit.floor import measure_floor, some_of
from zerodrift.audit.in_company import only_in_company
from zerodrift.audit.measure import Measurement, Observed, measure, tabulate
from zerodrift.audit.observe import BATCH, observe
from zerodrift.audit.plan import asked_again
from zerodrift.audit.probe_suite import ProbeSuite, guarded
from zerodrift.audit.probes.contract import contract, readable
from zerodrift.audit.probes.identity import smaller_vocabulary, tokenizer
from zerodrift.audit.probes.intermittent import IntermittentProbe
from zerodrift.audit.probes.parity import drawn_again, parity, samples
from zerodrift.audit.probes.result import ProbeResult, cut_off, found, not_judged
from zerodrift.audit.probes.template import chat_template, templates_asked
from zerodrift.audit.record import verdict_record
from zerodrift.audit.response.signs import Signs, settled
from zerodrift.audit.setup import AuditSetup
from zerodrift.backends.base import Capability
from zerodrift.core.cause import CAUSES, Layer
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import EngineError, EngineRefused, InvalidValue
from zerodrift.core.request import Request
from zerodrift.drift.floor import ROUNDED_IN, Floor
from zerodrift.drift.gates import Gates, gates_for
from zerodrift.drift.power import positions_asked
from zerodrift.drift.reach import stable_context
from zerodrift.drift.shape import describe, shape
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.case import Case
from zerodrift.records.directory import ROLLOUTS
from zerodrift.records.evidence import AgreementEvidence, ParityEvidence
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import CauseFound, FoundBy, Outcome, Probe, VerdictRecord

MORE_SAMPLES = 2
"""Times the plan, where its samples leave a doubt: at the level of 1e-2 twice as many see what those at 1e-6 nearly saw."""


class Material(NamedTuple):
    """What came back and was scored, and what it is held against: every later question looks at it."""

    answered: Sequence[Rollout]
    """Those with tokens, in the order of `measurements`."""
    measurements: Sequence[Measurement]
    table: TokenTable
    floor: Floor
    gates: Gates


@dataclass(frozen=True, kw_only=True)
class Audit(AuditSetup):
    """An audit that is set up, and how it runs."""

    def run(self) -> "Audited":
        """All probes; where numbers are wrong, also the smallest request that shows it."""
        audited, replay = self.judge()
        if replay is None:
            return audited
        self.progress.stage("reduce")
        return audited.with_case(replay.smallest())

    def judge(self) -> "tuple[Audited, FailureReplay | None]":
        """All probes, and how to ask again for the worst of wrong numbers; None where none are."""
        rng = np.random.default_rng(self.validation.seed)
        fingerprint = self._fingerprint()
        results, rollouts = self._ask()
        answered = [each for each in rollouts if each.completion is not None and each.completion.token_ids]
        observed = _observed(answered)
        if not observed:
            results.append(not_judged(Probe.PARITY, "nothing to compare", required=True))
            decision = decide(results, (), Circumstances(required=self.required))
            return self._audited(fingerprint, decision, None), None
        material = self._material(answered, observed)
        measurements, floor, gates = material.measurements, material.floor, material.gates
        numbers = parity(
            material.table, gates, rng, to_have_more="raise validation.equivalence_trials, --trials"
        )
        drawn = self._drawn(material.table, floor)
        results += [numbers, drawn]
        explained: tuple[CauseFound, ...] = ()
        # One sequence has no spread between sequences: what is wrong with it stays without a name.
        if len(measurements) > 1 and Outcome.FAIL in (numbers.status, drawn.status):
            explained = self._explain(material, rng)
            if numbers.status is Outcome.FAIL and nameless(explained):
                explained = self._parted(explained, material)
            explained = explained or by_samples_alone(drawn, self.engine.name)
        suite = ProbeSuite(self, self._gates(floor.unshaped or floor))
        semantic = any(cause.gating and CAUSES[cause.cause].layer is Layer.SEMANTIC for cause in explained)
        if numbers.status is drawn.status is Outcome.PASS:
            results += [*suite.ends(measurements), *suite.parameters(measurements), *suite.of_several()]
        results += [*suite.consistency(semantic=semantic), *suite.head(), *suite.given()]
        results.append(self._return(material, failed=numbers.status is Outcome.FAIL))
        if numbers.status is Outcome.FAIL and nameless(explained) and not _predicted(results):
            explained = self._in_company(material) or explained
        # Before an update: some engines show the digest of their weights as a setting.
        results += self._unchanged(fingerprint)
        worst = answered[max(range(len(measurements)), key=lambda number: _size(measurements[number]))].index
        replay = FailureReplay(self.engine, self.reference, gates, self.requests(), worst)
        results += suite.asked_for(measurements, rollouts, explained)
        signs = Signs(fingerprint.numeric, self.precision, results, _mean(numbers))
        explained = settled(explained, signs, self.engine.name)
        about = self._circumstances(fingerprint, _mean(numbers), gates.mean, replay)
        decision = _with_aside(decide(results, explained, about))
        return self._audited(fingerprint, decision, material), (
            replay if numbers.status is Outcome.FAIL else None
        )

    def _circumstances(
        self, fingerprint: EngineFingerprint, mean: float, gate: float, replay: FailureReplay
    ) -> Circumstances:
        return Circumstances(
            mean=mean,
            gate=gate,
            engine=self.engine.name,
            settings={**fingerprint.semantic, **fingerprint.numeric, **fingerprint.deployment},
            right_again=replay.is_right,
            required=self.required,
        )

    def _fingerprint(self) -> EngineFingerprint:
        """Asked before anything else: an engine that dies later was still this one."""
        try:
            return self.engine.fingerprint()
        except EngineError:
            return EngineFingerprint(engine=self.engine.name, semantic={}, numeric={}, deployment={})

    def _unchanged(self, fingerprint: EngineFingerprint) -> list[ProbeResult]:
        """An engine that was started anew in between is two engines, and no verdict is about either."""
        now = self._fingerprint()
        # One that no longer answers shows nothing, and was reported by the probe that it did not survive.
        if now.digest == fingerprint.digest or not (now.semantic or now.numeric):
            return []
        message = "the engine was started anew, or got other settings, during the audit: audit it again"
        return [not_judged(Probe.SETTINGS, message, required=True)]

    def _ask(self) -> tuple[list[ProbeResult], list[Rollout]]:
        self.progress.stage("sample")
        facts = self.reference.facts
        try:
            rollouts = observe(
                self.engine, self.requests(), "parity", self.directory / ROLLOUTS, self.progress.step
            )
        except InvalidValue as error:
            return [not_judged(Probe.CONTRACT, f"the engine failed: {error}", required=True)], []
        except EngineError as error:
            failed = cut_off(Probe.CONTRACT, error)
            if isinstance(error, EngineRefused) and (
                cause := smaller_vocabulary(self.engine, facts.vocab_size)
            ):
                failed = msgspec.structs.replace(failed, causes=(cause,))
            return [failed], []
        rollouts = [readable(rollout, facts.vocab_size) for rollout in rollouts]
        same = guarded(Probe.TOKENIZER, lambda: tokenizer(self.engine, self.reference))
        rendered = guarded(Probe.TEMPLATE, lambda: self._template(same))
        decode = self.reference.tokenizer.decode
        honoured = contract(rollouts, self.engine.name, facts, self.sources, decode)
        return [honoured, same, rendered], rollouts

    def _template(self, same: ProbeResult) -> ProbeResult:
        if same.status is Outcome.FAIL:
            # Whatever the template makes of messages, its text becomes other ids.
            return not_judged(Probe.TEMPLATE, "plain text becomes other ids already")
        return chat_template(self.engine, self.reference)

    def _material(self, answered: Sequence[Rollout], observed: Sequence[Observed]) -> Material:
        self.progress.stage("floor")
        floor = self._floor(observed)
        gates = self._gates(floor)
        self.progress.stage("score")
        stop_ids = self.reference.facts.eos_token_ids
        measurements = measure(self.reference.teacher, observed, stop_ids, self.progress.step)
        return Material(answered, measurements, tabulate(measurements, floor), floor, gates)

    def _floor(self, observed: Sequence[Observed]) -> Floor:
        some = some_of(observed)
        return measure_floor(
            self.reference.model,
            [item.passage for item in some],
            ROUNDED_IN[self.precision],
            sampled_with=[item.requested for item in some],
        )

    def _gates(self, floor: Floor) -> Gates:
        asked = self.validation
        cap = math.inf if asked.tolerance is None else asked.tolerance
        return gates_for(asked.gate_for(self.precision), floor, asked.own_gates, cap)

    def _return(self, material: Material, *, failed: bool) -> ProbeResult:
        self.progress.stage(Probe.RETURN)
        once_more = IntermittentProbe(
            engine=self.engine,
            reference=self.reference,
            plan=self.requests(),
            rollouts=material.answered,
            measurements=material.measurements,
            table=material.table,
            floor=material.floor,
            gates=material.gates,
            failed=failed,
            salt=f"return-{self.validation.seed}-{time.time_ns()}",
        )
        return guarded(Probe.RETURN, once_more.ask)

    def _drawn(self, table: TokenTable, floor: Floor) -> ProbeResult:
        """What the samples say; where that may be chance, twice as many others are asked for."""
        drawn = samples(table, greedy=self.sampling.greedy, to_have_more="--trials")
        if drawn.status is not Outcome.INCONCLUSIVE or drawn.vacuous:
            return drawn
        try:
            more = self._measured_anew(asked_again(self.planned(), times=MORE_SAMPLES))
        except EngineError:
            return drawn
        return drawn_again(drawn, samples(tabulate(more, floor), greedy=self.sampling.greedy))

    def _explain(self, material: Material, rng: np.random.Generator) -> tuple[CauseFound, ...]:
        measurements, gates = material.measurements, material.gates
        self.progress.stage("attribute")
        served = find_served(self.reference.teacher, measurements, gates)
        if served is not None:
            return (found("path/prefix-cache", self.engine.name, FoundBy.VALUE, served),)
        suspect = Suspect(self.reference.model, self.reference.tokenizer, self.reference.facts)
        attribution = diagnose(suspect, measurements, material.floor, gates, rng)
        if not attribution.explained_to_floor:
            # Asked last: prompts that differ by a BOS explain each other's outputs where a BOS was lost.
            swap = find_misbound(self.reference.teacher, measurements, gates)
            if swap is not None:
                return (found("semantic/misbound-output", self.engine.name, FoundBy.VALUE, swap),)
            teacher, stops = self.reference.teacher, self.reference.facts.eos_token_ids
            if (unrelated := find_unrelated(teacher, measurements, stops)) is not None:
                return (found("weights/other-model", self.engine.name, FoundBy.VALUE, unrelated),)
        lacking = not_asked(self.reference.model)
        left = describe(shape(material.table)) + (
            "; not asked of this model: " + ", ".join(lacking) if lacking else ""
        )
        return attributed(attribution, self.engine.name, left)

    def _parted(self, explained: tuple[CauseFound, ...], material: Material) -> tuple[CauseFound, ...]:
        """Numbers that nothing predicts: is it some tokens or requests alone that are wrong?"""
        facts, seed = self.reference.facts, self.validation.seed
        further = Further(
            self._measured_anew,
            self.sampling,
            facts.vocab_size,
            self.reference.tokenizer.all_special_ids,
            min(self.engine.max_model_len, facts.context_length),
            seed,
        )
        asked = Gathered(material.measurements, np.array([each.index for each in material.answered]))
        parted = parted_by(asked, material.floor, material.gates, np.random.default_rng(seed), further)
        return with_split(explained, parted, self.engine.name)

    def _in_company(self, material: Material) -> tuple[CauseFound, ...]:
        """Numbers that nothing predicts: are they right alone?"""
        self.progress.stage("company")
        sizes = [
            (rollout.index, float(np.abs(item.delta).mean()))
            for rollout, item in zip(material.answered, material.measurements, strict=True)
        ]
        salted = Capability.CACHE_SALT in self.engine.capabilities
        salt = f"company-{self.validation.seed}-{time.time_ns()}" if salted else None
        try:
            told = only_in_company(self._measured_each, self.requests(), sizes, material.gates, salt)
        except EngineError:
            return ()
        if told is None:
            return ()
        return (found("path/batch-variance", self.engine.name, FoundBy.VALUE, told, gating=True),)

    def _measured_anew(self, requests: list[Request]) -> Sequence[Measurement]:
        """What the engine answers to requests of no plan, where it can be read."""
        return [each for one in self._measured_each(requests) for each in one]

    def _measured_each(self, requests: list[Request]) -> list[Sequence[Measurement]]:
        """The same, of each request by itself."""
        askable = self._askable(requests)
        answers = [
            answer
            for begin in range(0, len(askable), BATCH)
            for answer in generated(self.engine, askable[begin : begin + BATCH])
        ]
        readable_ones = [
            [each for each in answer.completions if each.token_ids and np.isfinite(each.logprobs).all()]
            for answer in answers
        ]
        observed = [
            Observed(each, request.sampling)
            for request, completions in zip(requests, readable_ones, strict=True)
            for each in completions
        ]
        measured = iter(measure(self.reference.teacher, observed, self.reference.facts.eos_token_ids))
        return [list(islice(measured, len(completions))) for completions in readable_ones]

    def _audited(
        self, fingerprint: EngineFingerprint, decision: Decision, material: Material | None
    ) -> "Audited":
        floor, gates = (None, None) if material is None else (material.floor, material.gates)
        record = verdict_record(decision, fingerprint, self.reference, self.precision, floor, gates)
        power = [templates_asked(each) for each in decision.results if each.probe is Probe.TEMPLATE]
        if material is not None:
            context = min(self.engine.max_model_len, self.reference.facts.context_length)
            stable = stable_context(material.table, material.gates)
            power.append(positions_asked(material.table, context, stable))
        record = msgspec.structs.replace(record, power=(*record.power, *power))
        if material is None:
            return Audited(record, None, ())
        return Audited(record, material.table, tuple(material.measurements))


@dataclass(frozen=True)
class Audited:
    """The verdict, and the tokens behind it."""

    record: VerdictRecord
    table: TokenTable | None
    measurements: tuple[Measurement, ...]
    case: Case | None = None
    """The smallest request that shows the difference, where there is one."""

    def with_case(self, case: Case | None) -> "Audited":
        """The same, with the case in the verdict too."""
        if case is None:
            return self
        record = msgspec.structs.replace(self.record, smallest=case.message)
        return Audited(record, self.table, self.measurements, case)


def _observed(rollouts: Sequence[Rollout]) -> list[Observed]:
    """What came back, with what it was asked for."""
    return [
        Observed(each.completion, each.request.sampling) for each in rollouts if each.completion is not None
    ]


def _with_aside(decision: Decision) -> Decision:
    """A PASS says with its first words which parameters are not honoured, though this run uses none of them."""
    aside = [each.message for each in decision.results if each.probe is Probe.PARAMETERS and each.causes]
    if decision.verdict is not Outcome.PASS or not aside:
        return decision
    return decision._replace(message=f"{decision.message} But {aside[0]}.")


def _predicted(results: Sequence[ProbeResult]) -> bool:
    """Whether what the engine does in company is known to the number."""
    return any(isinstance(each.evidence, AgreementEvidence) and each.evidence.predicted for each in results)


def _mean(numbers: ProbeResult) -> float:
    """Mean |Δ|. Where none could be compared, nothing that the engine says of itself is known to be as large."""
    evidence = numbers.evidence
    if isinstance(evidence, ParityEvidence) and evidence.mean is not None:
        return evidence.mean
    return math.inf


def _size(item: Measurement) -> float:
    """How wrong a sequence is, by its worst token; one that could not be drawn is as bad as any."""
    return float(np.abs(item.delta).max())

"""The audit from first question to verdict: the ladder, in order, each rung once.

Everything that decides is elsewhere; this file says what happens when. An engine that dies or answers nonsense ends
a probe, not the audit: what could not be judged is said so, and the run directory can be resumed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from zerodrift.audit import verdict as judging
from zerodrift.audit.again import Again
from zerodrift.audit.counterfactual.binding import find_misbound
from zerodrift.audit.counterfactual.kinship import find_unrelated
from zerodrift.audit.diagnose import Suspect, diagnose
from zerodrift.audit.floor import ROUNDED_IN, Floor, measure_floor, some_of
from zerodrift.audit.measure import Measurement, Observed, TokenTable, measure, tabulate
from zerodrift.audit.observe import observe
from zerodrift.audit.probes.contract import contract, readable
from zerodrift.audit.probes.identity import smaller_vocabulary, tokenizer
from zerodrift.audit.probes.parity import Gates, fidelity, gates_for, greedy, parity
from zerodrift.audit.probes.result import ProbeResult, cut_off, found, not_judged
from zerodrift.audit.rungs import Rungs, guarded
from zerodrift.audit.setup import Setup
from zerodrift.audit.shape import describe, shape
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import EngineError, EngineRefused, InvalidValue
from zerodrift.records.case import Case
from zerodrift.records.directory import ROLLOUTS
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import CauseFound, Outcome, VerdictRecord


@dataclass(frozen=True, kw_only=True)
class Audit(Setup):
    """An audit that is set up, and how it runs."""

    def run(self) -> "Audited":
        """All rungs."""
        rng = np.random.default_rng(self.validation.seed)
        fingerprint = self._fingerprint()
        results, rollouts = self._ask()
        answered = [each for each in rollouts if each.completion is not None and each.completion.token_ids]
        observed = [
            Observed(each.completion, each.request.sampling)
            for each in answered
            if each.completion is not None
        ]
        if not observed:
            results.append(not_judged("parity", "nothing to compare", required=True))
            return self._audited(fingerprint, judging.conclude(results, ()), results, None, None, {}, ())
        self.progress.stage("floor")
        floor = self._floor(observed)
        gates = gates_for(self.validation.gate_for(self.precision), floor, self.validation.own_gates)
        measurements = self._measure(observed)
        table = tabulate(measurements, floor)
        parity_result = parity(table, gates, rng)
        fidelity_result = greedy(table) if self.sampling.greedy else fidelity(table)
        results += [parity_result, fidelity_result]
        causes: tuple[CauseFound, ...] = ()
        # One sequence has no spread between sequences: what is wrong with it stays without a name.
        if len(measurements) > 1 and Outcome.FAIL in (
            parity_result.record.status,
            fidelity_result.record.status,
        ):
            causes = self._diagnose(measurements, table, floor, gates, rng)
            causes = causes or judging.by_samples_alone(fidelity_result, self.engine.name)
        rungs = Rungs(self, gates)
        about_itself = rungs.consistency(semantic=any(c.cause.startswith("semantic/") for c in causes))
        # Where no Δ could be compared, nothing that the engine says of itself is known to be as large.
        mean = float(parity_result.record.evidence.get("mean", math.inf))
        causes, about_itself = judging.reconcile(causes, about_itself, mean, gates.mean)
        results += [*about_itself, *rungs.head(), *rungs.given()]
        # Before an update: some engines show the digest of their weights as a setting.
        results += self._unchanged(fingerprint)
        worst = answered[max(range(len(measurements)), key=lambda number: _size(measurements[number]))].index
        again = Again(self.engine, self.reference, gates, self.requests(), worst)
        asked = rungs.asked_for(measurements, rollouts, causes)
        causes = judging.decided_by_update(causes, asked, again.is_right, self.engine.name)
        results += asked
        conclusion = judging.conclude(results, causes)
        audited = self._audited(fingerprint, conclusion, results, floor, table, gates._asdict(), measurements)
        if parity_result.record.status is not Outcome.FAIL:
            return audited
        self.progress.stage("reduce")
        return audited.with_case(again.smallest())

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
        says = "the engine was started anew, or got other settings, during the audit: audit it again"
        return [not_judged("settings", says, required=True)]

    def _ask(self) -> tuple[list[ProbeResult], list[Rollout]]:
        self.progress.stage("sample")
        facts = self.reference.facts
        try:
            rollouts = observe(
                self.engine, self.requests(), "parity", self.directory / ROLLOUTS, self.progress.step
            )
        except InvalidValue as error:
            return [not_judged("contract", f"the engine failed: {error}", required=True)], []
        except EngineError as error:
            failed = cut_off("contract", error)
            if isinstance(error, EngineRefused) and (
                cause := smaller_vocabulary(self.engine, facts.vocab_size)
            ):
                failed = ProbeResult(failed.record, (cause,))
            return [failed], []
        rollouts = [readable(rollout, facts.vocab_size) for rollout in rollouts]
        same = guarded("tokenizer", lambda: tokenizer(self.engine, self.reference))
        return [contract(rollouts, self.engine.name, facts, self.sources), same], rollouts

    def _floor(self, observed: Sequence[Observed]) -> Floor:
        passages = [item.passage for item in some_of(observed)]
        return measure_floor(self.reference.model, passages, ROUNDED_IN[self.precision])

    def _measure(self, observed: Sequence[Observed]) -> Sequence[Measurement]:
        self.progress.stage("score")
        stop_ids = self.reference.facts.eos_token_ids
        return measure(self.reference.teacher, observed, stop_ids, self.progress.step)

    def _diagnose(
        self,
        measurements: Sequence[Measurement],
        table: TokenTable,
        floor: Floor,
        gates: Gates,
        rng: np.random.Generator,
    ) -> tuple[CauseFound, ...]:
        self.progress.stage("attribute")
        suspect = Suspect(self.reference.model, self.reference.tokenizer, self.reference.facts)
        attribution = diagnose(suspect, measurements, floor, gates, rng)
        if not attribution.explained_to_floor:
            # Asked last: prompts that differ by a BOS explain each other's outputs where a BOS was lost.
            swap = find_misbound(self.reference.teacher, measurements, gates)
            if swap is not None:
                return (found("semantic/misbound-output", self.engine.name, "attribution", swap),)
            teacher, stops = self.reference.teacher, self.reference.facts.eos_token_ids
            if (unrelated := find_unrelated(teacher, measurements, stops)) is not None:
                return (found(judging.OTHER_MODEL, self.engine.name, "attribution", unrelated),)
        return judging.attributed(attribution, self.engine.name, describe(shape(table)))

    def _audited(  # noqa: PLR0913 - the parts of a verdict
        self,
        fingerprint: EngineFingerprint,
        conclusion: judging.Conclusion,
        results: Sequence[ProbeResult],
        floor: Floor | None,
        table: TokenTable | None,
        gates: dict[str, float],
        measurements: Sequence[Measurement],
    ) -> "Audited":
        evidence = next((r.record.evidence for r in results if r.record.name == "parity"), {})
        record = VerdictRecord(
            verdict=conclusion.verdict,
            guilty=conclusion.guilty,
            says=conclusion.says,
            engine=fingerprint,
            reference=self.reference.fingerprint(),
            model=str(self.reference.spec),
            precision=self.precision.value,
            floor={}
            if floor is None
            else {"mean": floor.mean, "p90": floor.p90, "variants": floor.num_variants},
            metrics={key: float(value) for key, value in evidence.items() if not isinstance(value, str)},
            gates=gates,
            causes=conclusion.causes,
            probes=tuple(result.record for result in results),
        )
        return Audited(record, table, tuple(measurements))


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


def _size(item: Measurement) -> float:
    """How wrong a sequence is, by its worst token; one that could not be drawn is as bad as any."""
    return float(np.abs(item.delta).max())

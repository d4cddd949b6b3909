"""The audit from first question to verdict: the ladder, in order, each rung once.

Everything that decides is elsewhere; this file says what happens when. An engine that dies or answers nonsense ends
a probe, not the audit: what could not be judged is said so, and the run directory can be resumed.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from zerodrift.audit import verdict as judging
from zerodrift.audit.counterfactual.binding import find_misbound
from zerodrift.audit.diagnose import Suspect, diagnose
from zerodrift.audit.floor import Floor, measure_floor, some_of
from zerodrift.audit.measure import Measurement, Observed, TokenTable, measure, tabulate
from zerodrift.audit.observe import BATCH, observe
from zerodrift.audit.perturb import GroupedWeights, perturbed, write_checkpoint
from zerodrift.audit.plan import (
    LONG_PROMPT,
    PROBE_REQUESTS,
    SYNC_REQUESTS,
    UNCACHED_PROMPT,
    parity_requests,
    probe_requests,
    rewarded_requests,
)
from zerodrift.audit.probes.consistency import SelfConsistency
from zerodrift.audit.probes.contract import contract, readable
from zerodrift.audit.probes.given import given_tokens, recorded_in, same_reference, sampled_by
from zerodrift.audit.probes.parity import Gates, fidelity, gates_for, parity, sampling_cause
from zerodrift.audit.probes.result import ProbeResult, found, not_judged
from zerodrift.audit.probes.rewards import rewards
from zerodrift.audit.probes.sync import Update, weight_sync
from zerodrift.audit.probes.trainer import trainer
from zerodrift.audit.reduce import reduce
from zerodrift.audit.replay import Replay
from zerodrift.audit.shape import describe, shape
from zerodrift.audit.tasks import rewarded
from zerodrift.backends.base import Backend, Capability, need
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import CapabilityMissing, EngineError, InvalidPrompt, InvalidValue, ZerodriftError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.task import Scorer, Task
from zerodrift.records.baseline import BaselineHeader, BaselineRow
from zerodrift.records.case import Case
from zerodrift.records.directory import REFERENCE, ROLLOUTS
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import CauseFound, Outcome, VerdictRecord

DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP8: "bfloat16"}
GIVEN_SEQUENCES = 8


class Progress(Protocol):
    """Where an audit says how far it is; the command line draws a bar."""

    def stage(self, name: str) -> None:
        """A new rung begins."""
        ...

    def step(self, done: int, total: int) -> None:
        """So much of the rung is done."""
        ...


class Silent:
    """Says nothing."""

    def stage(self, name: str) -> None:
        """Nothing."""

    def step(self, done: int, total: int) -> None:
        """Nothing."""


class Baseline(NamedTuple):
    """What `zerodrift baseline record` wrote, as far as an audit needs it."""

    header: BaselineHeader
    rows: Sequence[BaselineRow]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What is audited, against what, how thoroughly."""

    engine: Backend
    reference: ReferenceBackend
    trainer: Scorer | None = None
    """The trainer's own forward, where the user brings it."""
    baseline: Baseline | None = None
    """Recorded ground truth, where there is one."""
    task: Task | None = None
    """Gave the prompts and rewards what is made of them, where the user brings one."""
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    validation: ValidationConfig
    precision: Precision
    directory: Path
    checkpoint: Path | None = None
    """A directory with the reference's weights; enables the weight-sync probe."""
    resets_cache: bool = True
    """Whether the trainer's own update resets the prefix cache."""
    progress: Progress = field(default_factory=Silent)

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
        gates = gates_for(self.validation.gate_for(self.precision), floor)
        measurements = self._measure(observed)
        table = tabulate(measurements, floor)
        parity_result, fidelity_result = parity(table, gates, rng), fidelity(table)
        results += [parity_result, fidelity_result]
        causes: tuple[CauseFound, ...] = ()
        # One sequence has no spread between sequences: what is wrong with it stays without a name.
        if len(measurements) > 1 and Outcome.FAIL in (
            parity_result.record.status,
            fidelity_result.record.status,
        ):
            causes = self._diagnose(measurements, table, floor, gates, rng)
        if len(measurements) > 1 and fidelity_result.record.status is Outcome.FAIL and not causes:
            # Numbers are right, samples are not, and no account of the sampler says how.
            says = fidelity_result.record.says
            causes = (found(sampling_cause(fidelity_result), self.engine.name, "sampling", says),)
        about_itself = self._consistency(gates, semantic=any(c.cause.startswith("semantic/") for c in causes))
        # Where no Δ could be compared, nothing that the engine says of itself is known to be as large.
        mean = float(parity_result.record.evidence.get("mean", math.inf))
        causes, about_itself = judging.reconcile(causes, about_itself, mean, gates.mean)
        results += about_itself
        results += self._given(gates)
        if self.trainer is not None:
            results.append(self._asked("trainer", lambda: self._trainer(measurements, gates)))
        if self.checkpoint is not None:
            results.append(self._asked("weight-sync", lambda: self._sync(gates)))
        if self.task is not None:
            results.append(self._asked("rewards", lambda: self._rewards(rollouts)))
        conclusion = judging.conclude(results, causes)
        audited = self._audited(fingerprint, conclusion, results, floor, table, gates._asdict(), measurements)
        if parity_result.record.status is not Outcome.FAIL:
            return audited
        worst = max(range(len(measurements)), key=lambda number: _size(measurements[number]))
        return audited.with_case(self._smallest(answered[worst].index, gates))

    def _fingerprint(self) -> EngineFingerprint:
        """Asked before anything else: an engine that dies later was still this one."""
        try:
            return self.engine.fingerprint()
        except EngineError:
            return EngineFingerprint(engine=self.engine.name, semantic={}, numeric={}, deployment={})

    def _ask(self) -> tuple[list[ProbeResult], list[Rollout]]:
        self.progress.stage("sample")
        try:
            rollouts = observe(
                self.engine, self._requests(), "parity", self.directory / ROLLOUTS, self.progress.step
            )
        except (EngineError, InvalidValue) as error:
            return [not_judged("contract", f"the engine failed: {error}", required=True)], []
        rollouts = [readable(rollout, self.reference.facts.vocab_size) for rollout in rollouts]
        return [contract(rollouts, self.engine.name, self.reference.facts)], rollouts

    def _floor(self, observed: Sequence[Observed]) -> Floor:
        passages = [item.passage for item in some_of(observed)]
        return measure_floor(self.reference.model, passages, DTYPES[self.precision])

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
        return judging.attributed(attribution, self.engine.name, describe(shape(table)))

    def _consistency(self, gates: Gates, *, semantic: bool) -> list[ProbeResult]:
        self.progress.stage("self-consistency")
        try:
            requests = self._probe_requests(self.validation.seed, PROBE_REQUESTS)
        except InvalidPrompt as error:
            return [not_judged("self-consistency", str(error), required=True)]
        itself = SelfConsistency(
            self.engine, self.reference, requests, gates, f"audit-{self.validation.seed}-{time.time_ns()}"
        )
        probes: list[tuple[str, Callable[[], ProbeResult]]] = [
            ("repeat", itself.repeat),
            ("batch", itself.batch),
            ("cache", itself.cache),
        ]
        if not semantic:
            # Scored tokens are never processed: while processing is at fault, this would only find it again.
            probes.append(("prefill-decode", itself.prefill_decode))
        results = []
        for number, (name, probe) in enumerate(probes):
            results.append(self._guard(name, probe))
            self.progress.step(number + 1, len(probes))
        if all(result.record.status is Outcome.INCONCLUSIVE for result in results):
            # Each may be missing for a good reason; an engine of which nothing is known is not passed.
            names = ", ".join(name for name, _ in probes)
            results.append(not_judged("self-consistency", f"none was answered: {names}", required=True))
        return results

    def _given(self, gates: Gates) -> list[ProbeResult]:
        """Parity the other way round, on fresh samples of the reference or on recorded ones."""
        self.progress.stage("given tokens")
        if self.baseline is None:
            sampling = msgspec.structs.replace(self.sampling, n=1, seed=self.validation.seed)
            requests = [Request(prompt, sampling) for prompt in self.prompts[:GIVEN_SEQUENCES]]
            given = sampled_by(self.reference, requests)
            return [self._guard("given-tokens", lambda: given_tokens(self.engine, given, gates))]
        header, given = self.baseline.header, recorded_in(self.baseline.rows)
        return [
            same_reference(self.reference, header, given, gates),
            self._guard("given-tokens", lambda: given_tokens(self.engine, given, gates)),
        ]

    def _smallest(self, index: int, gates: Gates) -> Case | None:
        """The request with this index, made as small as it can be without its answer becoming right."""
        self.progress.stage("reduce")
        if Capability.SEED not in self.engine.capabilities:
            return None
        requests = self._requests()
        first = index - index % BATCH
        company = [each for each in requests[first : first + BATCH] if each != requests[index]]
        # Twice the gate for nine in ten: the worst of 2,042 healthy tokens in fp32 was at a third of it.
        limit = 2 * gates.p90
        try:
            replay = Replay(self.engine, self.reference, limit)
            smallest = reduce((requests[index], *company), replay.first_bad)
        except ZerodriftError:
            return None
        return None if smallest is None else Case(requests=smallest, limit=limit)

    def _requests(self) -> list[Request]:
        trials, seed = self.validation.equivalence_trials, self.validation.seed
        return parity_requests(self.prompts, self.sampling, trials, seed)

    def _probe_requests(self, seed: int, count: int) -> list[Request]:
        facts = self.reference.facts
        room = min(self.engine.max_model_len, facts.context_length)
        special = self.reference.tokenizer.all_special_ids
        cached = Capability.CACHED_TOKENS in self.engine.capabilities
        longest = LONG_PROMPT if cached else UNCACHED_PROMPT
        return probe_requests(facts.vocab_size, room, special, seed, count, longest)

    def _rewards(self, rollouts: Sequence[Rollout]) -> ProbeResult:
        assert self.task is not None, "asked only with a task"
        self.progress.stage("rewards")
        try:
            # The engine's first: a task that fails is told before the reference samples for minutes.
            engine = rewarded(self.task, self.prompts, rollouts)
            requests = rewarded_requests(self._requests())
            path, step = self.directory / REFERENCE, self.progress.step
            sampled = observe(self.reference, requests, "rewards", path, step, source="reference")
            return rewards(
                self.task.name, engine, rewarded(self.task, self.prompts, sampled), self.validation.seed
            )
        except InvalidValue as error:
            return not_judged("rewards", str(error), required=True)

    def _trainer(self, measurements: Sequence[Measurement], gates: Gates) -> ProbeResult:
        assert self.trainer is not None, "asked only with a trainer"
        self.progress.stage("trainer")
        sequences = [item.observed.completion.sequence for item in measurements]
        return trainer(self.trainer, self.reference, sequences, gates)

    def _sync(self, gates: Gates) -> ProbeResult:
        assert self.checkpoint is not None, "asked only with a checkpoint"
        # First: the model of an engine that takes no update may be no directory, and nothing is written beside it.
        need(self.engine, Capability.LOAD_WEIGHTS, "it takes no update while it runs")
        self.progress.stage("weight-sync")
        requests = self._probe_requests(self.validation.seed + 1, SYNC_REQUESTS)
        model = self.reference.model
        changed = perturbed(model, self.validation.seed)
        after = write_checkpoint(changed, self.checkpoint, self.directory / "sync" / "b")
        update = Update(self.checkpoint, after, self.resets_cache)
        return weight_sync(self.engine, GroupedWeights(model, changed), update, requests, gates)

    def _guard(self, name: str, probe: Callable[[], ProbeResult]) -> ProbeResult:
        """A probe that the engine does not survive is not judged; the others still are, and none of it passes."""
        began = time.monotonic()
        try:
            result = probe()
        except CapabilityMissing as error:
            result = not_judged(name, str(error))
        except ZerodriftError as error:
            result = not_judged(name, f"the engine failed: {error}", required=True)
        record = msgspec.structs.replace(result.record, seconds=round(time.monotonic() - began, 3))
        return ProbeResult(record, result.causes)

    def _asked(self, name: str, probe: Callable[[], ProbeResult]) -> ProbeResult:
        """A probe that the user asked for: not judged is not passed."""
        result = self._guard(name, probe)
        return ProbeResult(msgspec.structs.replace(result.record, required=True), result.causes)

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
        record = msgspec.structs.replace(self.record, smallest=case.says)
        return Audited(record, self.table, self.measurements, case)


def _size(item: Measurement) -> float:
    """How wrong a sequence is, by its worst token; one that could not be drawn is as bad as any."""
    return float(np.abs(item.delta).max())

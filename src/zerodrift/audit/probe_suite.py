"""The probes beside parity: the engine against itself, given tokens, the trainer, weight updates, rewards.

Each is asked once, and none ends the audit: what an engine does not survive is not judged, and that is not passed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from zerodrift.audit.measure import Measurement
from zerodrift.audit.observe import observe
from zerodrift.audit.perturb import check_room, perturbed, write_checkpoint
from zerodrift.audit.plan import PROBE_REQUESTS, SYNC_REQUESTS, asked_again
from zerodrift.audit.probes.consistency import SelfConsistency
from zerodrift.audit.probes.ends import LikelyEnds
from zerodrift.audit.probes.given import Given, given_tokens, recorded_in, same_reference, sampled_by
from zerodrift.audit.probes.head import head_precision
from zerodrift.audit.probes.mixed import MixedBatch
from zerodrift.audit.probes.parameters import AskParameters
from zerodrift.audit.probes.result import ProbeResult, cut_off, not_judged
from zerodrift.audit.probes.rewards import rewards
from zerodrift.audit.probes.stream import stream
from zerodrift.audit.probes.trainer import trainer
from zerodrift.audit.probes.unseeded import unseeded
from zerodrift.audit.score_meaning import score_meaning
from zerodrift.audit.setup import AuditSetup
from zerodrift.audit.tasks import rewarded
from zerodrift.audit.update.sync import LEAST_SIGNAL, Update, weight_sync
from zerodrift.audit.update.weights import UpdatedWeights
from zerodrift.backends.base import Capability, need
from zerodrift.backends.teacher import Teacher
from zerodrift.config.precision import Precision
from zerodrift.core.cause import CAUSES
from zerodrift.core.errors import CapabilityMissing, EngineError, InvalidPrompt, InvalidValue, ZerodriftError
from zerodrift.core.memory import ran_out
from zerodrift.core.request import Request
from zerodrift.drift.gates import Gates
from zerodrift.records.directory import REFERENCE
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import CauseFound, Outcome, Probe

GIVEN_SEQUENCES = 8
MOVED_PROMPTS = 4


@dataclass(frozen=True)
class ProbeSuite:
    """What is asked beyond parity, and the gates it is judged by."""

    setup: AuditSetup
    gates: Gates

    def consistency(self, *, semantic: bool) -> list[ProbeResult]:
        self.setup.progress.stage("self-consistency")
        try:
            requests = self.setup.probe_requests(self.setup.validation.seed, PROBE_REQUESTS)
        except InvalidPrompt as error:
            return [not_judged(Probe.SELF_CONSISTENCY, str(error), required=True)]
        itself = SelfConsistency(
            self.setup.engine,
            self.setup.reference,
            requests,
            self.gates,
            f"audit-{self.setup.validation.seed}-{time.time_ns()}",
        )
        probes: list[tuple[Probe, Callable[[], ProbeResult]]] = [
            (Probe.REPEAT, itself.repeat),
            (Probe.BATCH, itself.batch),
            (Probe.CACHE, itself.cache),
            (Probe.STREAM, lambda: stream(itself)),
        ]
        if not semantic:
            # Scored tokens are never processed: while processing is at fault, this would only find it again.
            probes.append((Probe.PREFILL_DECODE, itself.prefill_decode))
        results = []
        for number, (name, ask) in enumerate(probes):
            results.append(guarded(name, ask))
            self.setup.progress.step(number + 1, len(probes))
        if all(result.status is Outcome.INCONCLUSIVE for result in results):
            # Each may be missing for a good reason; an engine of which nothing is known is not passed.
            names = ", ".join(name for name, _ in probes)
            results.append(not_judged(Probe.SELF_CONSISTENCY, f"none was answered: {names}", required=True))
        return results

    def head(self) -> list[ProbeResult]:
        """How logits were rounded, where the profile allows rounding and Δ alone does not say whose it is."""
        if self.setup.precision is Precision.FP32:
            return []
        self.setup.progress.stage(Probe.HEAD_PRECISION)

        def asked() -> ProbeResult:
            requests = self.setup.probe_requests(self.setup.validation.seed + 2, PROBE_REQUESTS)
            return head_precision(self.setup.engine, self.setup.reference, requests)

        return [guarded(Probe.HEAD_PRECISION, asked)]

    def ends(self, measurements: Sequence[Measurement]) -> list[ProbeResult]:
        """Stop tokens, where they are likely: of an engine whose numbers and draws are right as far as was seen."""
        self.setup.progress.stage(Probe.ENDS)
        sought = LikelyEnds(
            engine=self.setup.engine,
            reference=self.setup.reference,
            sampling=self.setup.sampling,
            measurements=measurements,
            band=self.gates.p90,
            seed=self.setup.validation.seed,
            seeded=self.setup.seeded,
        )
        return [guarded(Probe.ENDS, sought.ask)]

    def parameters(self, measurements: Sequence[Measurement]) -> list[ProbeResult]:
        """Each sampling parameter by itself: of an engine whose numbers and draws are right as far as was seen."""
        self.setup.progress.stage(Probe.PARAMETERS)
        asking = AskParameters(
            engine=self.setup.engine,
            reference=self.setup.reference,
            sampling=self.setup.sampling,
            measurements=measurements,
            band=self.gates.p90,
            seed=self.setup.validation.seed if self.setup.seeded else None,
        )
        return [guarded(Probe.PARAMETERS, asking.ask)]

    def of_several(self) -> list[ProbeResult]:
        """Requests with parameters of their own in one call, and such as have no seed: of an engine that is right so far."""
        self.setup.progress.stage(Probe.MIXED)

        def asked() -> list[Request]:
            return self.setup.probe_requests(self.setup.validation.seed + 3, PROBE_REQUESTS)

        def mixed() -> ProbeResult:
            return MixedBatch(self.setup.engine, self.setup.reference, asked(), self.gates.p90).ask()

        return [
            guarded(Probe.MIXED, mixed),
            guarded(Probe.UNSEEDED, lambda: unseeded(self.setup.engine, self.setup.reference, asked())),
        ]

    def given(self) -> list[ProbeResult]:
        """Parity the other way round, on fresh samples of the reference or on recorded ones."""
        self.setup.progress.stage("given tokens")
        if self.setup.baseline is None:
            return [guarded(Probe.GIVEN_TOKENS, self._sampled_by_the_reference)]
        header, given = self.setup.baseline.header, recorded_in(self.setup.baseline.rows)
        return [
            same_reference(self.setup.reference, header, given, self.gates),
            guarded(Probe.GIVEN_TOKENS, lambda: self._scores(given)),
        ]

    def _sampled_by_the_reference(self) -> ProbeResult:
        # First: an engine that cannot score is not worth the sampling.
        need(self.setup.engine, Capability.SCORE, "it does not score given tokens")
        sampling = msgspec.structs.replace(self.setup.sampling, n=1, seed=self.setup.validation.seed)
        # Position probes may lie beyond the context that the reference was trained for; and to score, an engine draws one
        # token more than it is given.
        served = self.setup.engine.max_model_len
        context = self.setup.reference.facts.context_length
        room = (context if served is None else min(context, served - 1)) - sampling.max_tokens
        fitting = [prompt for prompt in self.setup.prompts if len(prompt.token_ids) <= room]
        requests = [Request(prompt, sampling) for prompt in fitting[:GIVEN_SEQUENCES]]
        return self._scores(sampled_by(self.setup.reference, requests))

    def _scores(self, given: Sequence[Given]) -> ProbeResult:
        meaning = partial(score_meaning, self.setup.reference, self.gates, self.setup.engine.name)
        return given_tokens(self.setup.engine, given, self.gates, meaning)

    def asked_for(
        self, measurements: Sequence[Measurement], rollouts: Sequence[Rollout], causes: Sequence[CauseFound]
    ) -> list[ProbeResult]:
        """What is asked only where the user brings a trainer, a checkpoint to update to, or a task."""
        results = []
        if self.setup.trainer is not None:
            results.append(self._asked(Probe.TRAINER, lambda: self._trainer(measurements)))
        if self.setup.checkpoint is not None:
            results.append(self._asked(Probe.WEIGHT_SYNC, lambda: self._sync(causes)))
        if self.setup.task is not None:
            results.append(self._asked(Probe.REWARDS, lambda: self._rewards(rollouts)))
        return results

    def _trainer(self, measurements: Sequence[Measurement]) -> ProbeResult:
        assert self.setup.trainer is not None, "asked only with a trainer"
        self.setup.progress.stage(Probe.TRAINER)
        sequences = [item.observed.completion.sequence for item in measurements]
        return trainer(self.setup.trainer, self.setup.reference, sequences, self.gates)

    def _sync(self, causes: Sequence[CauseFound]) -> ProbeResult:
        assert self.setup.checkpoint is not None, "asked only with a checkpoint"
        if any(CAUSES[cause.cause].outranks for cause in causes):
            # vLLM dies of tensors that it has no place for.
            return not_judged(
                Probe.WEIGHT_SYNC, "the engine serves another model: nothing was pushed into it"
            )
        # First: the model of an engine that takes no update may be no directory, and nothing is written beside it.
        need(self.setup.engine, Capability.LOAD_WEIGHTS, "it takes no update while it runs")
        self.setup.progress.stage(Probe.WEIGHT_SYNC)
        requests = self.setup.probe_requests(self.setup.validation.seed + 1, SYNC_REQUESTS)
        model = self.setup.reference.model
        if told := check_room(model):
            self.setup.progress.note(told)
        saved = self.setup.reference.saved_dtype
        weights = perturbed(
            model, self.setup.validation.seed, lambda moved: self._moves(moved, requests), saved
        )
        after = write_checkpoint(
            weights.new, self.setup.checkpoint, self.setup.directory / "sync" / "b", saved
        )
        update = Update(self.setup.checkpoint, after, self.setup.resets_cache)
        try:
            return weight_sync(self.setup.engine, weights, update, requests, self.gates)
        finally:
            weights.bring(model)

    def _moves(self, weights: UpdatedWeights, requests: Sequence[Request]) -> bool:
        """Whether the update can be told from rounding, by what both make of some prompts."""
        prompts = [request.prompt.token_ids for request in requests[:MOVED_PROMPTS]]
        starts = [1] * len(prompts)
        scores = []
        for model in (weights.old, weights.new):
            weights.bring(model)
            scores.append(torch.cat(list(Teacher(model).logprobs(prompts, starts))))
        before, after = scores
        return float((before - after).abs().mean()) >= 2 * LEAST_SIGNAL * self.gates.mean

    def _rewards(self, rollouts: Sequence[Rollout]) -> ProbeResult:
        assert self.setup.task is not None, "asked only with a task"
        self.setup.progress.stage(Probe.REWARDS)
        try:
            # The engine's first: a task that fails is told before the reference samples for minutes.
            engine = rewarded(self.setup.task, self.setup.prompts, rollouts)
            requests = asked_again(self.setup.planned())
            path, step = self.setup.directory / REFERENCE, self.setup.progress.step
            sampled = observe(self.setup.reference, requests, "rewards", path, step, source="reference")
            return rewards(
                self.setup.task.name,
                engine,
                rewarded(self.setup.task, self.setup.prompts, sampled),
                self.setup.validation.seed,
            )
        except InvalidValue as error:
            return not_judged(Probe.REWARDS, str(error), required=True)

    def _asked(self, probe: Probe, ask: Callable[[], ProbeResult]) -> ProbeResult:
        """A probe that the user asked for: not judged is not passed."""
        return msgspec.structs.replace(guarded(probe, ask), required=True)


def guarded(probe: Probe, ask: Callable[[], ProbeResult]) -> ProbeResult:
    """A probe that the engine does not survive is not judged; the others still are, and none of it passes."""
    began = time.monotonic()
    try:
        result = ask()
    except CapabilityMissing as error:
        result = not_judged(probe, str(error))
    except EngineError as error:
        result = cut_off(probe, error)
    except ZerodriftError as error:
        result = not_judged(probe, str(error), required=True)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        message = str(error).partition("\n")[0] or type(error).__name__
        result = not_judged(
            probe, f"memory ran out ({message}); docs/errors.md#installout-of-memory", required=True
        )
    return msgspec.structs.replace(result, seconds=round(time.monotonic() - began, 3))

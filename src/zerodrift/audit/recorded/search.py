"""What made the bad steps bad? The cheapest questions first: how numbers are written, which weights, then all the rest.

Numbers that another base, another rollout or the weights from before predict to the last digit need no further account.
Only where none does are ids changed and scored again, and only then is everything tried that an audit tries.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from zerodrift.audit.attribute import Channel
from zerodrift.audit.by_split import nameless, with_split
from zerodrift.audit.counterfactual.binding import find_misbound
from zerodrift.audit.counterfactual.boundary import Gathered, parted_by
from zerodrift.audit.counterfactual.same_model import find_unrelated
from zerodrift.audit.diagnose import Suspect, by_meaning, diagnose
from zerodrift.audit.explain import attributed, by_samples_alone
from zerodrift.audit.measure import Measurement, tabulate
from zerodrift.audit.probes.result import ProbeResult, found, with_fix
from zerodrift.audit.recorded.dated import Dated, by_line, dated, parted
from zerodrift.audit.recorded.further_back import further_back
from zerodrift.audit.recorded.notation_readings import Fit, Notation, believed
from zerodrift.audit.recorded.reading import with_doubt
from zerodrift.audit.recorded.rescored import Rescored
from zerodrift.audit.recorded.scored import ScoredDump
from zerodrift.audit.recorded.sides import Side, Sides, judge_samples
from zerodrift.audit.recorded.told_precision import Scale
from zerodrift.audit.recorded.trainer import (
    OfTrainer,
    as_trainer,
    of_the_older,
    trainer_causes,
    written_otherwise,
)
from zerodrift.audit.recorded.weights import Suspected, compare_weights
from zerodrift.audit.response.signs import Signs, settled
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import LEAST_TOKENS, Gates
from zerodrift.drift.shape import describe, shape
from zerodrift.records.verdict import CauseFound, FoundBy, Outcome, Probe

Flags = NDArray[np.bool_]
STALE = "weights/stale"
OLDER_WEIGHTS = "--previous CHECKPOINT, which tells whether these are older weights"
ASK_PREVIOUS = "repeat with --previous CHECKPOINT, the weights of an update before: it tells whether these are older weights"
ALL = 0.99
"""Share of the difference: what other weights leave is more."""
CLEARLY = 3.0
"""Gates: a rollout further off than this has the fault, one within a single gate has not."""


class Found(NamedTuple):
    """Causes, further answers, and the rollouts that the first cause explains."""

    causes: tuple[CauseFound, ...] = ()
    results: tuple[ProbeResult, ...] = ()
    faulty: Flags | None = None
    message: str = "leave the checkpoint's numbers"
    in_force: Mapping[str, float] = {}
    """Sampling parameters that explain the engine's numbers or samples, where such do."""
    by_numbers: bool = False
    """Numbers tell those to the last digit; samples tell them roughly."""
    in_trainer: Mapping[str, float] = {}
    """Those that explain the trainer's numbers."""
    of_previous: bool = False
    """Every rollout has the numbers of the weights from before."""
    notation: Notation | None = None
    """In which the engine's numbers are written, where not as they should be."""

    @property
    def of_one_checkpoint(self) -> bool:
        """The loaded weights have every number under another account than of weights: labels of others are no contradiction."""
        return any(
            each.explained >= ALL
            for each in self.causes
            if not each.cause.startswith("weights/") and each.found_by != Probe.TRAINER
        )


class Search(NamedTuple):
    """The scored dump, and what is needed to ask further."""

    scored: ScoredDump
    reference: ReferenceBackend
    engine: str
    scale: Scale
    """Of the engine's numbers."""
    trainer_scale: Scale
    asked_previous: bool
    """Whether weights from before were at hand."""

    @property
    def floor(self) -> Floor:
        """Of the engine's numbers."""
        return self.scale.floor

    @property
    def gates(self) -> Gates:
        """The same."""
        return self.scale.gates

    def causes(self, sides: Sides, rng: np.random.Generator, *, same_numbers: bool) -> Found:
        """Causes of every bad side; the engine's alone where the trainer shows the same numbers."""
        guilty, known = sides.guilty, Found()
        if "engine" in guilty:
            known = self._engine(guilty["engine"], rng)
        elif "sampler" in guilty:
            known = self._sampler(guilty["sampler"], rng)
        if guilty.keys() & {"engine", "sampler"}:
            alone = by_samples_alone(sides.samples.overall, self.engine)
            known = known._replace(causes=known.causes or alone)
        if "trainer" in guilty and not same_numbers:
            trainer = self._trainer(guilty["trainer"], rng)
            known = known._replace(causes=joined(known.causes, trainer.causes), in_trainer=trainer.in_force)
        known = self._with_sign(known)
        in_force = {*known.in_force, *known.in_trainer}
        return known._replace(causes=with_doubt(known.causes, self.scored.rollouts, in_force))

    def dated(self, known: Found, sides: Sides) -> Dated | None:
        """Since when the engine's numbers have the fault; what only samples or the trainer show is not in them."""
        if not known.causes or (known.faulty is None and "engine" not in sides.guilty):
            return None
        sizes, gate = self.scored.sizes, self.gates.mean
        faulty = sizes > CLEARLY * gate if known.faulty is None else known.faulty
        sound = (sizes <= gate) & ~faulty
        # Without a name what is off counts where size alone parts the steps.
        named = known.causes[0].cause != UNEXPLAINED
        if not named and not (self.scale.told.in_fp32 and parted(self.scored.order, faulty, sound)):
            return None
        order = by_line(self.scored.order, [each.line for each in self.scored.rollouts], faulty)
        return dated(order, faulty, sound, known.message)

    def _engine(self, side: Side, rng: np.random.Generator) -> Found:
        older = self._compare_weights(side)
        if older.causes:
            return older
        late = further_back(self.scored, self.reference, self.gates, self.engine)
        if late is not None:
            return Found((late,), results=older.results)
        written = believed(iter(self.scored.accounts), self.scored.sizes, self.gates.mean)
        if (fit := written) is not None:
            return self._written(fit)._replace(results=older.results)
        if (fit := self._rescored_by_reference.fit()) is not None:
            # Of the steps that have other weights only their distance is known.
            read_so = (
                self._written(fit) if self.scored.of_reference.all() else Found(self._written(fit).causes)
            )
            return read_so._replace(results=older.results)
        return self._as_in_an_audit(side, rng)._replace(results=older.results)

    def _sampler(self, side: Side, rng: np.random.Generator) -> Found:
        """Padding that carries the model's own numbers passes for tokens that nobody would draw."""
        if (padded := self._padded_samples()) is not None:
            return Found((padded,))
        older = self._compare_weights(side)
        return older if older.causes else self._as_in_an_audit(side, rng)._replace(results=older.results)

    def _written(self, fit: Fit) -> Found:
        cause = found(fit.account.cause, self.engine, FoundBy.VALUE, fit.evidence, explained=fit.explained)
        return Found((cause,), faulty=fit.fits, message="are right if read so", notation=fit.account.notation)

    def _with_sign(self, known: Found) -> Found:
        """Numbers above zero are no logprobs, however well they fit."""
        if not any(rollout.sign_turned for rollout in self.scored.rollouts):
            return known
        if known.notation is Notation.PROBABILITY:
            return known
        if known.notation is not None:
            written, *others = known.causes
            written = msgspec.structs.replace(written, evidence=f"{written.evidence}; they lie above zero")
            return known._replace(causes=(written, *others))
        right = not known.causes
        message = "the numbers lie above zero, as −log p: " + (
            "with a minus sign they are the checkpoint's" if right else "they are judged with a minus sign"
        )
        cause = found("semantic/notation", self.engine, Probe.DUMP, message)
        every = np.ones(len(self.scored.rollouts), dtype=np.bool_)
        known = known._replace(causes=(cause, *known.causes), notation=Notation.SIGN)
        return known._replace(faulty=every, message="lie above zero") if right else known

    def _padded_samples(self) -> CauseFound | None:
        """The samples are as they should be without what looks like padding behind them."""
        table = tabulate(self.scored.measurements, self.floor)
        for pad in self._rescored.pads():
            trimmed = self._rescored.trimmed(pad)
            ends = [
                len(rollout.output) if each is None else each.end
                for rollout, each in zip(self.scored.rollouts, trimmed, strict=True)
            ]
            kept = table.index < np.array(ends)[table.sequence]
            again = (
                None
                if kept.all()
                else judge_samples(table.rows(kept), self.scored.order, self.scored.rollouts)
            )
            if again is not None and not again.bad and again.overall.status is Outcome.PASS:
                message = (
                    f"{int((~kept).sum())} tokens {pad} behind the ends of {sum(each is not None for each in trimmed)} "
                    "outputs were never drawn: without them the samples are as they should be"
                )
                return found("semantic/padding", self.engine, Probe.SAMPLING, message)
        return None

    def _compare_weights(self, side: Side) -> Found:
        if self.scored.older is None:
            return Found()
        members = self._members(side)
        suspected = Suspected(
            [self.scored.rollouts[i] for i in members],
            self.scored.sizes[members],
            self.scored.older[members],
        )
        answer = compare_weights(suspected, self.gates, self.engine)
        faulty = np.zeros(len(self.scored.rollouts), dtype=np.bool_)
        faulty[members] = answer.at_old
        message = "have the numbers of the previous weights"
        return Found(answer.result.causes, (answer.result,), faulty, message, of_previous=bool(faulty.all()))

    def _as_in_an_audit(self, side: Side, rng: np.random.Generator) -> Found:
        chosen = [self.scored.measurements[i] for i in self._asked(side)]
        if (swap := find_misbound(self.reference.teacher, chosen, self.gates)) is not None:
            message = (
                f"{swap} (requests are numbered from 0 over the {len(chosen)} rollouts of the bad steps)"
            )
            return Found((found("semantic/misbound-output", self.engine, FoundBy.VALUE, message),))
        if (some := self._some_of(side, rng)) is not None:
            return some
        attribution = diagnose(self._suspect, chosen, self.floor, self.gates, rng)
        if not attribution.explained_to_floor and (unrelated := self._unrelated(chosen)) is not None:
            return Found((found("weights/other-model", self.engine, FoundBy.VALUE, unrelated),))
        told = describe(shape(tabulate(chosen, self.floor)))
        if not self.asked_previous:
            told += "; whether these are older weights, --previous CHECKPOINT tells"
        # The profile is no sign: it has a default, and what it allows for is below the gate.
        signs = Signs(to_know=OLDER_WEIGHTS)
        causes = attributed(attribution, self.engine, told)
        if nameless(causes):
            # Who was in flight with whom is not recorded: all of them count as one company.
            asked = Gathered(chosen, np.arange(len(chosen)), len(chosen))
            causes = with_split(causes, parted_by(asked, self.floor, self.gates, rng), self.engine)
        causes = settled(causes, signs, self.engine)
        if not self.asked_previous:
            causes = tuple(_with_previous(each) if each.cause == UNEXPLAINED else each for each in causes)
        by_numbers = all(each.channel is Channel.REPORTED for each in attribution.selected)
        return Found(causes, in_force=attribution.explanation.sampling, by_numbers=by_numbers)

    def _some_of(self, side: Side, rng: np.random.Generator) -> Found | None:
        """Rollouts that another meaning explains to the last digit, beside others that are sound: one replica of several is
        configured in another way, and an account of all together explains neither kind."""
        asked, sizes, gate = np.array(self._asked(side)), self.scored.sizes, self.gates.mean
        sound, off = asked[sizes[asked] <= gate], asked[sizes[asked] > CLEARLY * gate]
        chosen = [self.scored.measurements[at] for at in off]
        enough = len(sound) > 0 and sum(len(item.delta) for item in chosen) >= LEAST_TOKENS
        # What is rounded as coarsely as bf16 rounds is not parted by size.
        if not enough or not self.scale.told.in_fp32 or len(sound) + len(off) < len(asked):
            return None
        attribution = by_meaning(self._suspect, chosen, self.floor, self.gates, rng)
        if not attribution.by_value:
            return None
        told = f"in {len(off)} of {len(asked)} rollouts, beside {len(sound)} that are the checkpoint's"
        causes = tuple(
            msgspec.structs.replace(each, evidence=f"{told}: {each.evidence}")
            for each in attributed(attribution, self.engine, "")
        )
        faulty = np.isin(np.arange(len(sizes)), off)
        # No parameter is in force in all of them: there is none to state.
        return Found(causes, faulty=faulty)

    def _unrelated(self, chosen: Sequence[Measurement]) -> str | None:
        """Why these are the tokens of another model; a few bad steps may hold too few to tell."""
        if sum(len(item.delta) for item in chosen) < LEAST_TOKENS:
            return None
        return find_unrelated(self.reference.teacher, chosen, self.reference.facts.eos_token_ids)

    def _trainer(self, side: Side, rng: np.random.Generator) -> OfTrainer:
        scale, sizes = self.trainer_scale, self.scored.trainer_sizes
        if (older := of_the_older(sizes, self.scored.trainer_older, scale.gates)) is not None:
            return OfTrainer((older,))
        known = np.where(np.isfinite(sizes), sizes, 0.0)
        if (fit := believed(iter(self.scored.trainer_accounts), known, scale.gates.mean)) is not None:
            return written_otherwise(fit)
        chosen = [
            as_trainer(self.scored.rollouts[i], self.scored.measurements[i])
            for i in self._asked(side)
            if self.scored.rollouts[i].trainer_logprobs is not None
        ]
        return trainer_causes(self._suspect, chosen, scale.floor, scale.gates, rng)

    def _members(self, side: Side) -> list[int]:
        """Rollouts of the bad steps; all where no step stands out."""
        if side.since is None or not side.since.affected:
            return list(range(len(self.scored.rollouts)))
        bad = np.isin(self.scored.order.of_sequence, side.since.affected)
        return np.flatnonzero(bad).tolist()

    def _asked(self, side: Side) -> list[int]:
        """Those that the loaded weights should have made; all of these where none is in a bad step."""
        own = np.flatnonzero(self.scored.of_reference).tolist()
        bad = set(self._members(side))
        return [i for i in own if i in bad] or own

    @property
    def _rescored(self) -> Rescored:
        return Rescored(self.reference, self.scored.rollouts, self.scored.sizes, self.gates.mean)

    @property
    def _rescored_by_reference(self) -> Rescored:
        own = np.flatnonzero(self.scored.of_reference).tolist()
        rollouts = [self.scored.rollouts[i] for i in own]
        return Rescored(self.reference, rollouts, self.scored.sizes[own], self.gates.mean)

    @property
    def _suspect(self) -> Suspect:
        return Suspect(self.reference.model, self.reference.tokenizer, self.reference.facts)


def joined(engine: Sequence[CauseFound], trainer: Sequence[CauseFound]) -> tuple[CauseFound, ...]:
    """Causes of both sides; one that both have is the engine's, and its evidence says so. A trainer with older weights is
    told for itself: beside it nobody knows which of the two checkpoints was to be served."""
    if old := next((each for each in trainer if each.cause == STALE), None):
        engine = [
            with_fix(msgspec.structs.replace(each, evidence=f"{each.evidence}; {old.evidence}"), old.fix)
            if each.cause == STALE
            else each
            for each in engine
        ]
        trainer = [each for each in trainer if each.cause not in {cause.cause for cause in engine}]
    shared = {cause.cause for cause in engine} & {cause.cause for cause in trainer}
    return (
        *(
            msgspec.structs.replace(cause, evidence=f"{cause.evidence}, and so does the trainer")
            if cause.cause in shared
            else cause
            for cause in engine
        ),
        *(cause for cause in trainer if cause.cause not in shared),
    )


def _with_previous(cause: CauseFound) -> CauseFound:
    """Older weights are the commonest reason for numbers that nothing explains, and one option away from being told."""
    return msgspec.structs.replace(cause, fix=ASK_PREVIOUS, particular_fix=True)

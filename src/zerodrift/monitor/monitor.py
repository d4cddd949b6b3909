"""`zerodrift.Monitor`: one call per batch, before it is trained on.

    decision = monitor.observe(behavior_logprobs=…, old_logprobs=…, versions=…, trainer_version=…, mask=…, step=…)
    if decision.train: …

Plan, run, commit: read the arrays (`intake`), reduce them to sums (`batch`), add those of other ranks, judge (`judge`),
move the breaker, write the state, archive, act. A batch that is refused leaves everything as it was. Where nothing but
writing fails, the decision stands, actions run, and then the error is raised (`commit`).
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import msgspec

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.config.precision import Magnitude, Precision
from zerodrift.core import require
from zerodrift.core.errors import InvalidSampling, InvalidValue
from zerodrift.core.request import SamplingParams
from zerodrift.monitor.actions import Actions, act
from zerodrift.monitor.archive import IDS, Archive, check_ids, keepable, opened, require_ids
from zerodrift.monitor.baseline import Baseline, check_below, check_grown, limits, of_canary
from zerodrift.monitor.batch import BatchSums, batch_sums, rewarded
from zerodrift.monitor.breaker import Breaker
from zerodrift.monitor.commit import Writes
from zerodrift.monitor.connected import check_connected, check_kept, given_baseline
from zerodrift.monitor.correction import Correction
from zerodrift.monitor.decide import (
    Outcome,
    Settings,
    decide,
    expected,
    is_probe_due,
    with_baseline,
    without_evidence,
)
from zerodrift.monitor.decision import Code, Decision, Reason, RewardView, State
from zerodrift.monitor.directory import MonitorDirectory
from zerodrift.monitor.intake import LOGPROBS, tokens_of
from zerodrift.monitor.judge import WHOLE
from zerodrift.monitor.labels import check_batch
from zerodrift.monitor.numbers import counted, number
from zerodrift.monitor.ranks import Gather, Read, over_ranks
from zerodrift.monitor.report import decision_of
from zerodrift.monitor.rewards import TEST_P, Output, against_reference
from zerodrift.monitor.scalar import judge_scalar
from zerodrift.monitor.state import MonitorState, StateFile
from zerodrift.monitor.turns import by_turns
from zerodrift.records.archive.writer import Archive as OwnArchive
from zerodrift.records.verdict import VerdictRecord


@by_turns
class Monitor:
    """Drift, staleness and learning told apart, batch by batch, with a breaker."""

    def __init__(  # noqa: PLR0913 - what a monitor is connected to, each by name
        self,
        config: MonitoringConfig | None = None,
        *,
        baseline: Baseline | VerdictRecord | str | Path | None = None,
        precision: str = "bf16",
        directory: str | Path | None = None,
        path: str | Path | None = None,
        gather: Gather | None = None,
        archive: Archive | str | Path | None = None,
        healthy_every: int = 100,
        actions: Actions | None = None,
        correction: Correction | None = None,
    ) -> None:
        """Everything is optional; see docs/monitor.md for what each adds.

        `directory`: for steps, state and archive at once, what `zerodrift view` shows. `baseline`: a canary's (`of_canary`),
        an audit's verdict, or the directory of an audit. `path`: where the state is kept. `gather`: gives everybody's bytes for
        one's own. `archive`: a directory, or anything with `append`, for bad batches and one of `healthy_every` others.
        """
        check_connected(config=config, actions=actions, archive=archive, gather=gather, correction=correction)
        check_kept(directory, path, healthy_every)
        self.config = config or MonitoringConfig()
        baseline = given_baseline(baseline)
        audit = baseline if isinstance(baseline, VerdictRecord) else None
        gate = limits(self.config, require.one_of(Precision, "precision", precision), audit)
        vouched = audit is not None or precision == Precision.FP32
        self._settings = Settings(self.config, gate, audited=audit is not None, vouched=vouched)
        self._gather, self._correction = gather, correction
        self._healthy_every, self._actions = healthy_every, actions or Actions()
        with ExitStack() as undo:
            self._directory = (
                None if directory is None else undo.enter_context(closing(MonitorDirectory(Path(directory))))
            )
            kept = self._directory.state if self._directory else path
            self._file = None if kept is None else StateFile(Path(kept))
            self._state = MonitorState() if self._file is None else self._file.read()
            if isinstance(baseline, Baseline) and self._state.baseline is None:
                check_below(baseline, gate)
                self._state = with_baseline(self._state, baseline)
            self._archive = opened(archive)
            if self._archive is not archive and isinstance(self._archive, OwnArchive):
                # One that the caller opened is the caller's to close.
                undo.enter_context(self._archive)
            self._held = undo.pop_all()
        # Of a process that starts in a halt nobody knows whether its actions ran: the one before was killed, maybe.
        self._was, self._closed = State.OK, False
        self.last: Decision | None = None
        """The last decision, also of a call that raised because it could not be recorded."""

    @property
    def gate(self) -> Magnitude:
        """What no mismatch may exceed, whatever the baseline."""
        return self._settings.gate

    @property
    def state(self) -> State:
        """Of the breaker."""
        return self._state.breaker.state

    @property
    def remembered(self) -> MonitorState:
        """All that is kept from one step to the next."""
        return self._state

    # --- observing ---------------------------------------------------------------------------------------------------

    def observe(  # noqa: PLR0913 - one per thing that a trainer may know of its batch
        self,
        *,
        behavior_logprobs: Any = None,
        old_logprobs: Any = None,
        current_logprobs: Any = None,
        rescored_logprobs: Any = None,
        rescored_mask: Any = None,
        versions: Any = None,
        trainer_version: int | None = None,
        mask: Any = None,
        rewards: Any = None,
        outputs: Sequence[Output] | None = None,
        lengths: Any = None,
        groups: Mapping[str, Any] | None = None,
        reference_kl: float | None = None,
        prompt_ids: Any = None,
        completion_ids: Any = None,
        sampling: SamplingParams | None = None,
        step: int | None = None,
    ) -> Decision:
        """Judge a batch. Logprobs and versions per token: [sequence, token] with a mask, lists, or flat with lengths.

        `rescored_mask`: which tokens, or sequences, have rescored_logprobs, where not all were scored again.
        `prompt_ids` and `completion_ids` go to the archive with the rest, which needs them, and are not looked at; so does
        `sampling`, by which the trainer had the tokens drawn, and without which blame has to be told.
        """
        given = {name: value for name, value in locals().items() if name != "self" and value is not None}
        try:
            if self._gather is None:
                found, state = self._read(given, self._state), self._state
            else:
                state, found = over_ranks(
                    self._gather, self._settings, self._state, partial(self._read, given)
                )
            check_batch(each.where for each in found.sums.sight)
        except Exception:
            self._state = msgspec.structs.replace(self._state, refused=self._state.refused + 1)
            raise
        outcome = decide(state, found.step, found.sums, found.trainer_version, self._settings)
        return self._commit(found.step, found.sums, outcome, given)

    def _read(self, given: dict[str, Any], state: MonitorState) -> Read:
        """What is wrong with the call raises here, before anything is judged."""
        step = self._next(given.get("step"), state)
        for name, plain in (("trainer_version", counted), ("reference_kl", number)):
            if name in given:
                given[name] = plain(name, given[name])
        return Read(step, given.get("trainer_version"), self._summed(given, state))

    def _summed(self, given: Mapping[str, Any], state: MonitorState) -> BatchSums:
        if self._archive is not None:
            require_ids(given)
        if "sampling" in given:
            require.instance(InvalidSampling, "sampling", given["sampling"], SamplingParams)
        archived = self._archive_of(given) is not None  # opened now: one that cannot be is an error
        told = ("mask", "lengths", "versions", "trainer_version", "groups", "rescored_mask")
        tokens = tokens_of(
            {name: given.get(name) for name in LOGPROBS}, **{name: given.get(name) for name in told}
        )
        if archived:
            check_ids(given, tokens.widths)
        sums = batch_sums(
            tokens, epsilon=self.config.clip_epsilon, baseline=state.baseline, expect=partial(expected, state),
            correction=self._correction,
        )  # fmt: skip
        return rewarded(sums, tokens, given.get("rewards"), given.get("outputs"))

    def _archive_of(self, given: Mapping[str, Any]) -> Archive | None:
        """Where a batch would be kept; a directory's archive keeps those that have ids."""
        if self._archive is not None or self._directory is None:
            return self._archive
        return self._directory.archive() if all(name in given for name in IDS) else None

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidValue("this monitor was closed, and another may have its directory; make a new one")

    def _next(self, step: int | None, state: MonitorState) -> int:
        self._check_open()
        last = state.step
        if step is None:
            return 0 if last is None else last + 1
        step = counted("step", step)
        if last is not None and step <= last:
            raise InvalidValue(
                f"step {step} came after step {last}; a batch is judged once, in order: after a resume, call rewind({step - 1})"
            )
        return step

    # --- committing --------------------------------------------------------------------------------------------------

    def _commit(self, step: int, sums: BatchSums, outcome: Outcome, given: Mapping[str, Any]) -> Decision:
        """State on the disk first, then the archive, then actions: what is killed in between stays halted."""
        self._state, writes = outcome.state, Writes()
        decision = decision_of(
            step, sums, outcome, given.get("reference_kl"), enabled=self.config.circuit_breaker_enabled
        )
        decision = msgspec.structs.replace(decision, kl_estimate=given.get("kl_estimate"))
        with writes.attempt():
            self._write()
        unkept: tuple[Reason, ...] = ()
        with writes.attempt():
            unkept = self._keep(decision, given)
        decision = msgspec.structs.replace(decision, reasons=(*decision.reasons, *unkept))
        entered = decision.state is State.HALT and self._was is not State.HALT
        acted = act(self._actions, decision, entered_halt=entered)
        # Of an action that opened the breaker again it is not halted any more.
        self._was = self._state.breaker.state
        if acted.fell_back:
            with writes.attempt():
                self._half_open()
        decision = msgspec.structs.replace(decision, reasons=(*decision.reasons, *acted.failed))
        self.last = decision
        if self._directory is not None:
            self._directory.tell(decision)
        writes.raise_first(decision, acted.leave)
        return decision

    def _keep(self, decision: Decision, given: Mapping[str, Any]) -> tuple[Reason, ...]:
        """What the archive could not take is said; a batch that trips must not raise for the very thing it trips by."""
        sampled = self._state.observed % self._healthy_every == 0
        archive = self._archive_of(given)
        if archive is None or "completion_ids" not in given or not (decision.bad or sampled):
            return ()
        batch, without = keepable(decision.step, decision, given)
        if batch is not None:
            archive.append(batch)
        return () if without is None else (Reason(code=Code.NOT_ARCHIVED, message=without),)

    def _write(self) -> None:
        if self._file is not None:
            self._file.write(self._state)

    # --- what else may happen ----------------------------------------------------------------------------------------

    def log_step(
        self,
        step: int,
        kl_estimate: float,
        reward_mean: float | None = None,
        *,
        reference_kl: float | None = None,
    ) -> Decision:
        """The one-line form. `kl_estimate` is engine against trainer at equal weights, mean k3 per token.

        `reference_kl`, the distance to a frozen policy, is recorded and never trips.
        """
        step, kl_estimate = self._next(step, self._state), number("kl_estimate", kl_estimate)
        reward_mean = None if reward_mean is None else number("reward_mean", reward_mean)
        reference_kl = None if reference_kl is None else number("reference_kl", reference_kl)
        scalar, reasons = judge_scalar(
            self._state.scalar, kl_estimate, reward_mean, self.gate.k3, vouched=self._settings.vouched
        )
        bad = any(reason.bad for reason in reasons)
        due = is_probe_due(self._state, self.config)
        after = msgspec.structs.replace(
            self._state,
            step=step,
            scalar=scalar,
            observed=self._state.observed + 1,
            bad=self._state.bad + bad,
            mismatch_seen=step,
            breaker=self._moved(bad=bad, warned=bool(reasons)),
        )
        told = {"kl_estimate": kl_estimate, "reward_mean": reward_mean, "reference_kl": reference_kl}
        given = {name: value for name, value in told.items() if value is not None}
        rewards = None if reward_mean is None else RewardView(count=1, mean=reward_mean)
        return self._commit(step, BatchSums(), Outcome(after, reasons, rewards, due), given)

    def _moved(self, *, bad: bool, warned: bool = False) -> Breaker:
        return self._state.breaker.update(bad=bad, warned=warned, windows=self.config.consecutive_windows)

    def trigger_alert(self, message: str = "an alert was triggered by hand") -> Decision:
        """Count a bad window that something else saw; actions run as for any other."""
        require.instance(InvalidValue, "message", message, str)
        return self._alert(Reason(code=Code.ALERT, message=message))

    def compare_rewards(self, engine: Any, reference: Any) -> Decision | None:
        """Rewards of engine and reference on the same probe prompts; where they differ it is a bad window, else None."""
        p_value, ours, theirs = against_reference(engine, reference)
        if p_value >= TEST_P:
            return None
        message = f"on the probe prompts the engine earns {ours:.4g} and the reference {theirs:.4g}"
        return self._alert(
            Reason(code=Code.ALERT, message=message, where="rewards", value=p_value, limit=TEST_P)
        )

    def _alert(self, reason: Reason) -> Decision:
        self._check_open()
        after = msgspec.structs.replace(self._state, breaker=self._moved(bad=True), bad=self._state.bad + 1)
        return self._commit(
            self._state.step or 0, BatchSums(), Outcome(after, (reason,), None, probe_due=True), {}
        )

    def retake(self, behavior_logprobs: Any, trainer_logprobs: Any, *, trusted: bool = False) -> Baseline:
        """Replace the baseline by a canary's: one that lies above the gate is refused.

        A canary of the engine that is being watched may carry the fault that is being looked for: it is taken only where
        it lies within JUMP of what is expected. `trusted` says that an engine known to be good has made it.
        """
        self._check_open()
        fresh = of_canary(behavior_logprobs, trainer_logprobs)
        old = self._state.baseline
        check_below(fresh, self.gate)
        if old is not None and not trusted:
            check_grown(fresh, old, expected(self._state, WHOLE).factor)
        self._state = with_baseline(self._state, fresh)
        self._write()
        return fresh

    def half_open(self) -> None:
        """Somebody has looked: let batches through on probation, with charts that start from zero."""
        self._check_open()
        self._half_open()

    def _half_open(self) -> None:
        self._was = State.WARN
        self._state = without_evidence(
            msgspec.structs.replace(self._state, breaker=self._state.breaker.half_open())
        )
        self._write()

    def rewind(self, step: int, trainer_version: int | None = None) -> None:
        """Training goes on from a checkpoint: the next step is the one after `step`."""
        self._check_open()
        # -1: nothing was trained yet, and the next is step 0.
        step = counted("step", step, -1)
        if trainer_version is not None:
            trainer_version = counted("trainer_version", trainer_version)
        seen = self._state.mismatch_seen
        # A step that is yet to come has seen nothing.
        self._state = msgspec.structs.replace(
            self._state, step=step, trainer_version=trainer_version, mismatch_seen=None if seen is None else min(seen, step)
        )  # fmt: skip
        self._write()

    def restore(self, state: MonitorState) -> None:
        """Be as after an earlier step (`remembered`, kept then): what was judged later is forgotten, and shown no more."""
        self._check_open()
        require.instance(InvalidValue, "state", state, MonitorState)
        self._was = self._was if state.breaker.state is State.HALT else state.breaker.state
        self._state = state
        self._write()
        if self._directory is not None:
            self._directory.forget_after(-1 if state.step is None else state.step)

    def end(self) -> None:
        """The training is over, as far as its trainer knows: a page says so, until another batch comes."""
        if self._directory is not None and not self._closed:
            self._directory.end()

    def __enter__(self) -> "Monitor":
        """To be closed at the end of a `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """A twin in another process, or beside this one, would decide by itself, and nobody would hear of its halt."""
        raise InvalidValue("a monitor is not copied or sent elsewhere: make one in the process that trains")

    def close(self) -> None:
        """Let go of what this one opened, so that another monitor may have it; nothing is lost without. This one judges no more."""
        self._closed = True
        self._held.close()

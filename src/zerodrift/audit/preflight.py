"""The checklist before a training run, from first item to last: doctor, audit, weight-sync, rewards, history.

This file says what happens when; `checklist` and `history` say what it means. An engine that fails ends an item, not
the checklist.
"""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from zerodrift.audit import checklist
from zerodrift.audit.checklist import JudgedTarget
from zerodrift.audit.history import NAME as HISTORY
from zerodrift.audit.history import RewardHistory, history_item
from zerodrift.audit.progress import Progress
from zerodrift.audit.session import DEFAULT_MODEL, Session, Wrap
from zerodrift.backends.http import RefusalAdvice
from zerodrift.backends.registry import api_key
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import EngineError, ZerodriftError
from zerodrift.doctor.diagnosis import Diagnosis, diagnose
from zerodrift.doctor.open_target import open_target
from zerodrift.doctor.server import Server
from zerodrift.doctor.setting import FileKind, Origin, Setting, Settings
from zerodrift.doctor.zerodrift_file import RUNNING, VLLM
from zerodrift.records.directory import check_run_directory
from zerodrift.records.preflight import (
    PREFLIGHT,
    Item,
    PreflightRecord,
    Status,
    read_preflight,
    worst,
    write_preflight,
)
from zerodrift.records.rewards import Rewards
from zerodrift.records.verdict import Probe, VerdictRecord
from zerodrift.tasks.checked import open_task

_ADVICE = RefusalAdvice(
    key="put the server's --api-key into a variable and name it in the file: engine.api_key_env",
    load="try again later",
)


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """One checklist, as the command line or a test asks for it."""

    path: Path
    """The configuration's file: the doctor reads what is written there, not what was made of it."""
    config: RunConfig
    directory: Path
    sync: bool = True
    resets_cache: bool = True
    history: RewardHistory | None = None
    """Earlier runs to compare rewards with."""
    recorded: RewardHistory | None = None
    """What the file holds to which this run's rewards are to be added: the same task's, or nothing."""
    wrap: Wrap | None = None
    """Plants a fault in the engine."""
    environment: bytes | None = None

    def run(self, progress: Progress, reproduce: str = "") -> PreflightRecord:
        """All items; everything but the pages is then in the directory.

        What can be refused is refused before the directory is touched.
        """
        check_run_directory(self.directory)
        self._check_task()
        when = self._when()
        progress.stage(checklist.DOCTOR)
        items = [checklist.doctor_item(self._judged())]
        found = self._audited(progress)
        rewards = None
        if isinstance(found, VerdictRecord):
            rewards = checklist.rewards_of(found, when)
            items += self._items(found, rewards, reproduce)
        else:
            items += self._without_an_audit(found)
        record = PreflightRecord(
            status=worst(item.status for item in items),
            config=str(self.path),
            engine=self.config.engine.name,
            model=self.config.model.path or DEFAULT_MODEL,
            items=tuple(items),
            rewards=rewards,
            reproduce=reproduce,
        )
        write_preflight(self.directory, record)
        return record

    def _check_task(self) -> None:
        """A history of another task is told before anything is generated."""
        histories = [each for each in (self.history, self.recorded) if each is not None]
        spec = self.config.validation.task
        if histories and spec is not None:
            task = open_task(spec, self.config.model.path or DEFAULT_MODEL)
            for history in histories:
                history.check_task(task.name)

    def _judged(self) -> list[JudgedTarget]:
        """The doctor's targets; what cannot be read is said, and the audit goes on to measure it."""
        name, engine = shlex.quote(str(self.path)), self.config.engine
        server = engine.url if engine.name == VLLM else None
        try:
            target = open_target(str(self.path), FileKind.ZERODRIFT)
            asked = target.read().settings
            # A running server is asked below, or by the audit: to neither diagnosis is it unknown.
            known = {RUNNING: Setting(RUNNING, None, Origin.ASKED)} if RUNNING in asked else {}
            diagnosis, _ = diagnose(target, known, asks_server=server is not None)
            judged, asked = [JudgedTarget(name, diagnosis)], {**asked, **known}
        except ZerodriftError as error:
            judged, asked = [JudgedTarget(name, f"cannot be judged: {error}")], {}
        if server is not None:
            judged.append(JudgedTarget(shlex.quote(server), self._server(server, asked), engine.api_key_env))
        return judged

    def _server(self, url: str, asked: Settings) -> Diagnosis | str:
        key = api_key(self.config.engine)  # one that is not set is the user's to mend, before anything runs
        try:
            return diagnose(Server(url, api_key=key, advice=_ADVICE), asked)[0]
        except ZerodriftError as error:
            return f"cannot be judged: {error}"

    def _audited(self, progress: Progress) -> VerdictRecord | str:
        """The verdict, or what became of the engine instead."""
        # Ours, so that an audit which never began does not take it away: the checklist goes there.
        self.directory.mkdir(parents=True, exist_ok=True)
        session = Session(
            config=self.config,
            directory=self.directory,
            sync=self.sync,
            resets_cache=self.resets_cache,
            wrap=self.wrap,
            environment=self.environment,
        )
        try:
            return session.run(progress, shlex.join(self._audit_words())).record
        except EngineError as error:
            return str(error)

    def _audit_words(self) -> list[str]:
        """The audit alone."""
        words = ["zerodrift", "audit", "--config", str(self.path)]
        return words + ["--sync"] * self.sync + ["--no-reset-cache"] * (self.sync and not self.resets_cache)

    def _items(self, verdict: VerdictRecord, rewards: Rewards | None, reproduce: str) -> list[Item]:
        sync = checklist.sync_item(verdict, f"{reproduce} --no-sync") if self.sync else self._no_sync()
        if self.config.validation.task is None:
            return [checklist.audit_item(verdict), sync, *self._no_task()]
        compared = checklist.rewards_item(verdict)
        return [checklist.audit_item(verdict), sync, compared, self._history(rewards, compared)]

    def _without_an_audit(self, problem: str) -> list[Item]:
        """The engine could not be spoken to at all."""
        again = shlex.join([*self._audit_words(), "--out", str(self.directory)])
        failed = Item(name=checklist.AUDIT, status=Status.INCONCLUSIVE, message=problem, type=(again,))
        sync = checklist.not_run(Probe.WEIGHT_SYNC, checklist.AUDIT) if self.sync else self._no_sync()
        if self.config.validation.task is None:
            return [failed, sync, *self._no_task()]
        rewards = checklist.not_run(Probe.REWARDS, checklist.AUDIT)
        return [failed, sync, rewards, self._history(None, rewards)]

    def _no_sync(self) -> Item:
        return checklist.left_out(Probe.WEIGHT_SYNC, "left out with --no-sync", "leave --no-sync out")

    def _no_task(self) -> Sequence[Item]:
        why, typed = f"{self.path} names no task", "validation.task: sums, or my_module:task"
        return [checklist.left_out(name, why, typed) for name in (Probe.REWARDS, HISTORY)]

    def _history(self, rewards: Rewards | None, compared: Item) -> Item:
        if self.history is None:
            return checklist.left_out(HISTORY, "no --history to compare with", self._to_have_one(compared))
        if rewards is None:
            return checklist.not_run(HISTORY, Probe.REWARDS)
        # A run that was killed after it was recorded goes on, and agrees with itself.
        others = tuple(run for run in self.history.runs if run != rewards)
        if not others:
            why = f"{self.history.path} holds this very run alone"
            return checklist.left_out(HISTORY, why, "--out another directory, for another run")
        return history_item(rewards, others, compared.status)

    def _to_have_one(self, compared: Item) -> str:
        """What to type, of a run that does not record what it would be held against."""
        if self.recorded is None:
            return "--record FILE now, and --history FILE the next time"
        if compared.status is not Status.PASS:
            return f"settle {Probe.REWARDS} first: what does not pass is not recorded"
        return f"--history {shlex.quote(str(self.recorded.path))} the next time"

    def _when(self) -> str:
        """Of the run, not of its repetition: what was recorded once is not recorded again."""
        if (self.directory / PREFLIGHT).is_file() and (known := read_preflight(self.directory).rewards):
            return known.when
        return datetime.now(UTC).isoformat(timespec="seconds")

"""Batches that were kept, from the list of them down to tokens. What a browser asks for is looked up in the index."""

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from zerodrift.core.errors import RecordError, ZerodriftError
from zerodrift.monitor.directory import ARCHIVE, RANKS
from zerodrift.records.archive.index import Entry, Query
from zerodrift.records.archive.layout import INDEX, is_archive
from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState
from zerodrift.view.visible import visible

SUSPECT = (BatchState.WARN, BatchState.QUARANTINE, BatchState.HALT)
MOST_BATCHES, MOST_ROLLOUTS, MOST_TOKENS = 200, 500, 200
"""That one answer holds; the page says how many there are, and tokens come in pages."""
MOST_PROMPT = 2000
"""Ids of a prompt that are shown."""


class Batches:
    """The archives below one directory: that of the first rank, and those of the others."""

    def __init__(self, directory: Path) -> None:
        """Nothing is read yet."""
        self._directory = directory
        self._seen: dict[Path, tuple[int, ...]] = {}
        self._read: tuple[str, ArchivedBatch] | None = None
        self._reading = threading.Lock()
        self.listing: dict[str, Any] = {
            "archives": 0,
            "suspect": 0,
            "healthy": 0,
            "batches": [],
            "problem": "",
        }

    def poll(self) -> bool:
        """Whether there is something new to list; an index that did not change is not opened."""
        now = {path: _signature(path / INDEX) for path in self._archives()}
        if now == self._seen:
            return False
        self._seen, before = now, self.listing
        self.listing = self._listed()
        return self.listing != before

    def _archives(self) -> list[Path]:
        places = (
            self._directory,
            self._directory / ARCHIVE,
            *sorted(self._directory.glob(f"{RANKS}/{ARCHIVE}")),
        )
        return [path for path in places if is_archive(path) and (path / INDEX).is_file()]

    def _listed(self) -> dict[str, Any]:
        found: list[Entry] = []
        healthy, problem = 0, ""
        for path in self._seen:
            try:
                with ArchiveReader(path) as reader:
                    found += [entry for state in SUSPECT for entry in reader.entries(Query(state=state))]
                    healthy += len(reader.entries(Query(state=BatchState.OK)))
            except ZerodriftError as error:
                problem = f"{error} [{error.code}]"
            except msgspec.MsgspecError as error:
                problem = f"{path / INDEX} holds what no monitor writes ({error})"
        found.sort(key=lambda entry: (entry.step, entry.archived_at), reverse=True)
        shown = [_entry(entry) for entry in found[:MOST_BATCHES]]
        return {
            "archives": len(self._seen), "suspect": len(found), "healthy": healthy, "batches": shown,
            "problem": visible(problem),
        }  # fmt: skip

    def rollouts(self, name: str) -> dict[str, Any]:
        """Of one batch, the worst first."""
        batch = self._batch(name)
        rows = [_rollout(place, rollout) for place, rollout in enumerate(batch.rollouts)]
        rows.sort(key=lambda row: -math.inf if row["off_by"] is None else -row["off_by"])
        return {
            "batch": name,
            "step": batch.step,
            "state": batch.state.upper(),
            "reasons": [visible(reason) for reason in batch.reasons],
            "trainer_version": _text(batch.trainer_version),
            "total": len(rows),
            "rollouts": rows[:MOST_ROLLOUTS],
        }

    def tokens(self, name: str, place: int, begin: int) -> dict[str, Any]:
        """Of one rollout, from token `begin` on."""
        rollouts = self._batch(name).rollouts
        if place >= len(rollouts):
            raise RecordError(
                f"the batch {name[:12]} has {len(rollouts)} rollouts, and none with number {place}"
            )
        rollout = rollouts[place]
        basis, beside = _beside(rollout)
        labels = [span.version.label for span in rollout.versions for _ in range(span.start, span.end)]
        rows = [
            [
                index,
                rollout.token_ids[index],
                _number(rollout.behavior_logprobs[index]),
                _number(beside[index]) if beside else None,
                _number(beside[index] - rollout.behavior_logprobs[index]) if beside else None,
                visible(labels[index]) if labels else None,
                rollout.mask[index] if rollout.mask else True,
            ]
            for index in range(begin, min(begin + MOST_TOKENS, len(rollout.token_ids)))
        ]
        return {
            "id": visible(rollout.id),
            "prompt": rollout.prompt_token_ids[:MOST_PROMPT],
            "prompt_total": len(rollout.prompt_token_ids),
            "basis": basis,
            "total": len(rollout.token_ids),
            "begin": begin,
            "tokens": rows,
        }

    def _batch(self, name: str) -> ArchivedBatch:
        """The last one is kept: whoever opens a batch asks for its tokens next."""
        with self._reading:
            if self._read is None or self._read[0] != name:
                self._read = name, self._found(name)
            return self._read[1]

    def _found(self, name: str) -> ArchivedBatch:
        missing: ZerodriftError = RecordError("nothing is archived in this directory")
        for path in self._archives():
            with ArchiveReader(path) as reader:
                try:
                    entry = reader.find(name)
                except RecordError as error:
                    missing = error
                    continue
                return reader.read(entry)
        raise missing


def _signature(index: Path) -> tuple[int, ...]:
    """Changes when a batch is added: rows go to the log beside the index first."""
    found: list[int] = []
    for path in (index, index.with_name(index.name + "-wal")):
        try:
            told = path.stat()
        except OSError:
            found += [0, 0]
        else:
            found += [told.st_mtime_ns, told.st_size]
    return tuple(found)


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "batch": entry.batch,
        "step": entry.step,
        "state": entry.state.upper(),
        "rollouts": entry.rollouts,
        "tokens": entry.tokens,
        "reasons": [visible(reason) for reason in entry.reasons],
        "archived_at": entry.archived_at,
    }


def _beside(rollout: ArchivedRollout) -> tuple[str, Sequence[float]]:
    """The trainer's numbers that the engine's are held against, and which they are."""
    if rollout.rescored_logprobs is not None:
        return "rescored", rollout.rescored_logprobs
    return ("", ()) if rollout.old_logprobs is None else ("old", rollout.old_logprobs)


def _rollout(place: int, rollout: ArchivedRollout) -> dict[str, Any]:
    basis, beside = _beside(rollout)
    used = rollout.mask or (True,) * len(rollout.token_ids)
    gaps = [
        abs(other - mine)
        for mine, other, counts in zip(rollout.behavior_logprobs, beside, used, strict=bool(beside))
        if counts
    ]
    told = [gap for gap in gaps if math.isfinite(gap)]
    return {
        "place": place,
        "id": visible(rollout.id),
        "prompt": len(rollout.prompt_token_ids),
        "output": len(rollout.token_ids),
        "in_loss": sum(used),
        "missing": len(gaps) - len(told),
        "reward": _number(rollout.reward),
        "environment": _text(rollout.environment),
        "replica": _text(rollout.replica),
        "version": _text(rollout.version),
        "basis": basis,
        "off_by": math.fsum(told) / len(told) if told else None,
        "worst": max(told, default=None),
    }


def _text(value: str | None) -> str | None:
    return None if value is None else visible(value)


def _number(value: float | None) -> float | None:
    """JSON has no NaN: what is none is null."""
    return value if value is not None and math.isfinite(value) else None

"""What viewers are sent: one reader of the files, and for each viewer what is new to it.

An event's id says how far a viewer is (`feed.epoch.row.revision`), so that one that was cut off goes on from there. After a restart of
the server, or a training that went back to a checkpoint, the id is of another feed or epoch, and all is sent anew.
"""

import base64
import math
import re
import secrets
import threading
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from zerodrift.monitor.directory import ARCHIVE, STEPS
from zerodrift.monitor.writer import Writer, writer_of
from zerodrift.records.directory import CONFIG, ROLLOUTS, VERDICT
from zerodrift.view.live.batches import Batches
from zerodrift.view.live.series import Series, Told, step_of
from zerodrift.view.live.tail import Tail
from zerodrift.view.visible import visible

POLL_S = 0.25
ARCHIVE_POLL_S = 1.0
BLOCK = 8192
"""Rows of one event: 1.5 MB, a tenth of a second of reading for a browser."""
MOST_EVENTS = 4
"""Blocks that are made at once: the first are drawn while the others are on their way."""
_ID = re.compile(r"([0-9a-f]{16})\.(\d{1,9})\.(\d{1,12})\.(\d{1,12})")


@dataclass(slots=True)
class Cursor:
    """How far one viewer is."""

    epoch: int = -1
    row: int = 0
    revision: int = 0
    """Of the history that it knows."""
    status: int = -1
    listing: int = -1


class Feed:
    """One directory, read by one thread, for any number of viewers."""

    def __init__(self, directory: Path) -> None:
        """`start` begins to read."""
        self.directory = directory
        self.series, self.batches = Series(), Batches(directory)
        self._name = secrets.token_hex(8)
        self._steps, self._answers = Tail(directory / STEPS), Tail(directory / ROLLOUTS)
        self._unreadable, self._first_bad, self._lines = 0, "", 0
        self._audit: dict[str, Any] | None = None
        self._trouble = ""
        self._writer: Writer | None = None
        self._version, self._status, self._listing = 0, 0, 0
        self._changed = threading.Condition()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerodrift-view", daemon=True)

    def start(self) -> None:
        """Read, from now until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Let go of the files, and of everybody who waits."""
        self._ends.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._steps.close()
        self._answers.close()

    @property
    def closed(self) -> bool:
        """Whether it ends."""
        return self._ends.is_set()

    def _run(self) -> None:
        archive_due = 0.0
        while not self._ends.is_set():
            more = False
            try:
                more = self.poll()
                if time.monotonic() >= archive_due:
                    self.poll_batches()
                    self.poll_writer()
                    archive_due = time.monotonic() + ARCHIVE_POLL_S
                self._tell_trouble("")
            except OSError as error:  # a network's file system may be gone for a while
                self._tell_trouble(f"{error.filename or self.directory}: {error.strerror}; trying again")
            if not more:
                self._ends.wait(POLL_S)

    def _tell_trouble(self, says: str) -> None:
        if says != self._trouble:
            with self._changed:
                self._trouble = says
                self._status += 1
                self._version += 1
                self._changed.notify_all()

    # --- reading -----------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Read what is new, and say whether there was anything."""
        lines = self._steps.read()
        audit = self._look_at_audit()
        if not lines and audit == self._audit:
            return False
        with self._changed:
            for line in lines:
                self._take(line)
            self._audit = audit
            self._status += 1
            self._version += 1
            self._changed.notify_all()
        return bool(lines)

    def _take(self, line: bytes) -> None:
        self._lines += 1
        try:
            self.series.add(step_of(line))
        except ValueError as error:
            self._unreadable += 1
            self._first_bad = self._first_bad or f"line {self._lines}: {error}"

    def _look_at_audit(self) -> dict[str, Any] | None:
        if self._steps.found or not (self.directory / CONFIG).is_file():
            return None
        answers = (self._audit or {}).get("answers", 0) + len(self._answers.read())
        return {"answers": answers, "finished": (self.directory / VERDICT).is_file()}

    def poll_batches(self) -> None:
        """Look whether the archive has grown."""
        if self.batches.poll():
            with self._changed:
                self._listing += 1
                self._version += 1
                self._changed.notify_all()

    def poll_writer(self) -> None:
        """Look whether somebody still writes. After the lines: who has ended has written all of them."""
        if (found := writer_of(self.directory)) != self._writer:
            with self._changed:
                self._writer = found
                self._status += 1
                self._version += 1
                self._changed.notify_all()

    # --- sending -----------------------------------------------------------------------------------------------------

    def resume(self, last_event_id: str | None) -> Cursor:
        """Where a viewer was; raises ValueError for what is no id of ours."""
        if not last_event_id:
            return Cursor()
        match = _ID.fullmatch(last_event_id)
        if match is None:
            raise ValueError("Last-Event-ID is none that this server has sent")
        name, epoch, row, revision = match[1], int(match[2]), int(match[3]), int(match[4])
        if name != self._name or epoch != self.series.epoch or row > len(self.series):
            return Cursor()
        return Cursor(epoch=epoch, row=row, revision=revision)

    def wait(self, version: int, seconds: float) -> None:
        """Until there is something newer than `version`, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version or self.closed, seconds)

    def after(self, cursor: Cursor) -> tuple[int, list[bytes]]:
        """Events that are new to a viewer, which it has then, and the version that they make."""
        events: list[bytes] = []
        with self._changed:
            series = self.series
            if cursor.epoch != series.epoch:
                cursor.epoch, cursor.row, cursor.revision = series.epoch, 0, 0
                events.append(self._event("reset", {}, cursor))
            while cursor.row < len(series) and len(events) < MOST_EVENTS:
                begin = cursor.row
                cursor.row = min(begin + BLOCK, len(series))
                events.append(self._event("rows", _block(series, begin, cursor.row), cursor))
            if changes := [change for change in series.changes if change.revision > cursor.revision]:
                cursor.revision = series.revision
                events.append(self._event("changes", [_change(each) for each in changes], cursor))
            if cursor.status != self._status:
                cursor.status = self._status
                events.append(self._event("status", self.status(), cursor))
            if cursor.listing != self._listing:
                cursor.listing = self._listing
                events.append(self._event("batches", self.batches.listing, cursor))
            return self._version, events

    def status(self) -> dict[str, Any]:
        """What stands now, for the head of the page."""
        last, series = self.series.last, self.series
        return {
            "name": visible(self.directory.resolve().name),
            "path": visible(str(self.directory)),
            "found": self._steps.found,
            "archive": ARCHIVE,
            "audit": self._audit,
            "writer": self._writer,
            "now": time.time(),
            "rows": len(series),
            "state": last.state if last else None,
            "step": last.step if last else None,
            "time": last.time if last else None,
            "tokens": last.metrics.get("zerodrift/tokens") if last else None,
            "reasons": [_reason(reason) for reason in last.reasons] if last else [],
            "unseen": {gap: visible(why) for gap, why in series.unseen().items()},
            "counts": series.counts,
            "kept_back": series.kept_back,
            "rewound": series.rewound[-1] if series.rewound else None,
            "unreadable": self._unreadable + self._steps.skipped,
            "first_bad": visible(self._first_bad),
            "trouble": visible(self._trouble),
        }

    def _event(self, kind: str, content: Any, cursor: Cursor) -> bytes:
        name = f"{self._name}.{cursor.epoch}.{cursor.row}.{cursor.revision}"
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (
            name.encode(),
            kind.encode(),
            msgspec.json.encode(content),
        )


def _block(series: Series, begin: int, end: int) -> dict[str, Any]:
    """Rows as columns: numbers of the machine in base 64, a third of their length in decimals. All-NaN ones are left out."""
    parts = {name: column[begin:end] for name, column in series.columns.items()}
    columns = {name: _packed(part) for name, part in parts.items() if not all(map(math.isnan, part))}
    return {
        "begin": begin,
        "count": end - begin,
        "steps": _packed(series.steps[begin:end]),
        "times": _packed(series.times[begin:end]),
        "columns": columns,
    }


def _packed(values: "array[float]") -> str:
    return base64.b64encode(values.tobytes()).decode()


def _change(change: Any) -> dict[str, Any]:
    return {
        **{
            name: getattr(change, name)
            for name in ("id", "first", "last", "count", "state", "before", "time")
        },
        "reasons": [_reason(reason) for reason in change.reasons],
    }


def _reason(reason: Told) -> dict[str, Any]:
    return {
        "code": visible(reason.code),
        "says": visible(reason.message),
        "gap": visible(reason.gap or ""),
        "where": visible(reason.where),
        "warning": reason.warning,
    }

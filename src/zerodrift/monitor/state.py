"""All that a monitor remembers, in one small file: a restarted training goes on where it stood, a halted one halted."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from zerodrift.core.errors import ArchiveLocked, RecordError
from zerodrift.core.frozen import freeze
from zerodrift.monitor.baseline import Baseline, WarmUp
from zerodrift.monitor.breaker import Breaker
from zerodrift.monitor.labels import Labels
from zerodrift.monitor.rewards import RewardWindow
from zerodrift.monitor.scalar import ScalarTrack
from zerodrift.monitor.sight import Sight
from zerodrift.monitor.tracks import Chart, Track
from zerodrift.records.document import read_document, write_document

SCHEMA = "zerodrift.monitor/1"


class MonitorState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between two steps."""

    schema: str = SCHEMA
    step: int | None = None
    """The last one that was observed."""
    trainer_version: int | None = None
    breaker: Breaker = Breaker()
    baseline: Baseline | None = None
    warm_up: WarmUp = WarmUp()
    tracks: Mapping[str, Track] = {}
    gate: Chart = Chart()
    """Of batches that are above the gate, each by no more than chance allows."""
    rewards: RewardWindow = RewardWindow()
    scalar: ScalarTrack = ScalarTrack()
    observed: int = 0
    bad: int = 0
    """Batches kept from training."""
    refused: int = 0
    """Calls that raised: they are no healthy batches, and no bad ones."""
    mismatch_seen: int | None = None
    """The last step at which a mismatch could be measured."""
    sight: Sight = Sight()
    labels: Labels = Labels()

    def __post_init__(self) -> None:
        """What was remembered stays."""
        freeze(self, "tracks")


def read_state(path: Path) -> MonitorState:
    """What is there, or a fresh start; a file that cannot be read is refused, since it may say HALT."""
    if path.is_dir():
        raise RecordError(f"{path} is a directory, and a state is a file in one: name it, or give directory=")
    if not path.exists():
        return MonitorState()
    return read_document(path, MonitorState, SCHEMA, "state of a monitor")


def write_state(path: Path, state: MonitorState) -> None:
    """Whole or not at all."""
    try:
        write_document(path, state)
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written ({error.strerror or error}): a restart would go on from an older state; look at the disk"
        ) from error


class StateFile:
    """The file of one monitor. Another that writes there too is found by what it left in the place of ours."""

    def __init__(self, path: Path) -> None:
        """`read` comes first. Its folder is made, as a directory of a monitor is: a state that can never be written is refused now.
        It stays where it is, wherever the process goes."""
        path = path.absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(
                f"{path.parent} cannot be made ({error.strerror or error}); choose another path"
            ) from error
        self._path, self._process = path, os.getpid()
        self._which: tuple[int, int] | None = None
        self._left = MonitorState()

    def read(self) -> MonitorState:
        """From here on it is ours."""
        self._which, self._left = self._there(), read_state(self._path)
        return self._left

    def write(self, state: MonitorState) -> None:
        """Refused where another monitor has written since, and in a fork of the process that it belongs to."""
        if os.getpid() != self._process:
            raise RecordError(
                f"{self._path} belongs to the monitor of process {self._process}, and this is a fork of it; observe there"
            )
        found = self._there()
        # A copy that a backup put there is ours still.
        if found not in (None, self._which) and read_state(self._path) != self._left:
            raise ArchiveLocked(
                f"{self._path} was written by another monitor since: what that one knows, a halt maybe, is left as it is; "
                "give each a path of its own"
            )
        write_state(self._path, state)
        self._which, self._left = self._there(), state

    def _there(self) -> tuple[int, int] | None:
        """Which file it is: each write makes a new one."""
        try:
            told = self._path.stat()
        except OSError:
            return None
        return told.st_ino, told.st_mtime_ns

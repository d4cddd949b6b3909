"""Which runs does a directory hold, and what did each of them find?

A run is a directory with a configuration or a verdict of ours. None is left out: an unfinished one can be resumed,
and one that cannot be read is listed with the reason, for a run that vanished from the list would be taken for one
that never was.
"""

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from zerodrift.config.load import load
from zerodrift.core.errors import ConfigError, DigestMismatch, RecordError
from zerodrift.records.directory import CONFIG, VERDICT, read_verdict
from zerodrift.records.verdict import Outcome

RUNS = Path("runs")
"""Where an audit without --out puts its run directories."""


class State(StrEnum):
    """How far a run got."""

    FINISHED = "finished"
    UNFINISHED = "unfinished"
    """It has no verdict: killed, or still at work. The same command with the same --out goes on with it."""
    UNREADABLE = "unreadable"
    ALTERED = "altered"
    """Its verdict is not the one that the run wrote."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list; None where the run does not say."""

    name: str
    state: State
    when: datetime
    """When the verdict was written; of a run without one, when anything last was."""
    verdict: Outcome | None = None
    cause: str | None = None
    """The principal cause that fails the audit."""
    engine: str | None = None
    model: str | None = None
    mean: float | None = None
    """Mean |Δ| in nats."""
    problem: str | None = None
    """Why it cannot be read."""


def list_runs(directory: Path) -> tuple[RunSummary, ...]:
    """Every run in `directory`, newest first."""
    if not directory.is_dir():
        raise RecordError(
            f"there is no directory {directory}; `zerodrift audit` makes one with its first run"
        )
    found = [
        _summary(path)
        for path in directory.iterdir()
        if (path / CONFIG).is_file() or (path / VERDICT).is_file()
    ]
    return tuple(sorted(found, key=lambda run: (run.when, run.name), reverse=True))


def find_run(word: str, directory: Path = RUNS) -> Path:
    """The run directory that `word` names: a path, or a name out of the list."""
    candidates = (Path(word), directory / word)
    found = next((path for path in candidates if path.is_dir()), None)
    if found is None:
        raise RecordError(
            f"there is no run {word!r}, here or in {directory}; `zerodrift audit ls` lists them"
        )
    return found


def _summary(path: Path) -> RunSummary:
    # A name that is not UTF-8 cannot be written as JSON; shown with escapes it can.
    name = path.name.encode(errors="backslashreplace").decode()
    finished = (path / VERDICT).is_file()
    when = _when(path / VERDICT) if finished else max(_when(file) for file in path.iterdir())
    try:
        told = _finished(path) if finished else _unfinished(path)
    except (RecordError, ConfigError) as error:
        state = State.ALTERED if isinstance(error, DigestMismatch) else State.UNREADABLE
        told = {"state": state, "problem": str(error)}
    return RunSummary(name=name, when=when, **told)


def _when(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, tz=UTC)


def _finished(path: Path) -> dict[str, Any]:
    record = read_verdict(path)
    return {
        "state": State.FINISHED,
        "verdict": record.verdict,
        "cause": record.to_fix[0].cause if record.to_fix else None,
        "engine": record.engine.engine,
        "model": record.model,
        "mean": record.metrics.get("mean"),
    }


def _unfinished(path: Path) -> dict[str, Any]:
    config = load(path / CONFIG)
    return {"state": State.UNFINISHED, "engine": config.engine.name, "model": config.model.path}

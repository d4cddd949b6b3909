"""What a monitor is connected to, checked when it is made: at the first bad batch, hours later, is too late."""

from pathlib import Path
from typing import Any

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.actions import Actions
from zerodrift.monitor.baseline import Baseline
from zerodrift.records.directory import read_verdict
from zerodrift.records.verdict import VerdictRecord


def check_connected(*, config: Any, actions: Any, archive: Any, gather: Any, correction: Any) -> None:
    """Each is None, or what it is taken for."""
    for name, value, kind in (("config", config, MonitoringConfig), ("actions", actions, Actions)):
        if value is not None:
            require.instance(InvalidValue, name, value, kind)
    for name, value in (("gather", gather), ("correction", correction)):
        if value is not None and not callable(value):
            raise InvalidValue(f"{name} is {value!r:.60}; give something that can be called")
    if archive is not None and not isinstance(archive, str | Path) and not hasattr(archive, "append"):
        raise InvalidValue(f"archive is {archive!r:.60}; give a directory, or something with append(batch)")


def check_kept(directory: Any, path: Any, healthy_every: Any) -> None:
    """Where the state goes, and how many healthy batches the archive gets."""
    if directory is not None and path is not None:
        raise InvalidValue("the state is kept in the directory: give directory= or path=, not both")
    rule = "one of so many healthy batches is archived"
    require.whole(InvalidValue, "healthy_every", healthy_every, rule, 1)


def given_baseline(baseline: Any) -> Baseline | VerdictRecord | None:
    """A canary's, or an audit's verdict, which may be named by its directory."""
    if isinstance(baseline, str | Path):
        return read_verdict(Path(baseline))
    if baseline is not None:
        require.instance(InvalidValue, "baseline", baseline, Baseline | VerdictRecord)
    found: Baseline | VerdictRecord | None = baseline
    return found

"""What a monitor is connected to, checked when it is made: at the first bad batch, hours later, is too late."""

from pathlib import Path
from typing import Any

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.actions import Actions


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

"""What a user names as `module:attribute` on the command line."""

import importlib
import sys
from pathlib import Path
from typing import Any

from zerodrift.core.errors import ConfigError


def imported(what: str, spec: str, name: str, attribute: str) -> Any:
    """The attribute of module `name`; `what` says in messages what `spec` was to be. The module's own errors pass."""
    # As `python -m` does: the user's module lies where the command was given.
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise ConfigError(f"{what} {spec!r}: there is no module {name!r} here or installed") from error
    finally:
        sys.path.remove(here)
    if not hasattr(module, attribute):
        raise ConfigError(f"{what} {spec!r}: module {name!r} has no {attribute!r}")
    return getattr(module, attribute)

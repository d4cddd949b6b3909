"""What a user names as `module:attribute` on the command line: an object that is ready, or a function of the model."""

import importlib
import sys
from pathlib import Path
from typing import Any

from zerodrift.core.errors import ConfigError


def load(what: str, spec: str, model: str | Path, kind: Any, examples: str, lacks: str) -> Any:
    """The object of this kind that `spec` names, for this model; `what` says in messages what it was to be."""
    name, _, attribute = spec.partition(":")
    if not name or not attribute:
        raise ConfigError(f"{what} {spec!r} names nothing; write {examples}")
    try:
        found = _imported(what, spec, name, attribute)
        ready = isinstance(found, kind) and not isinstance(found, type)
        thing = found(str(model)) if callable(found) and not ready else found
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's module, which fails in any way it likes
        raise ConfigError(f"{what} {spec!r} could not be made: {in_a_line(error)}") from error
    if not isinstance(thing, kind):
        raise ConfigError(f"{what} {spec!r} is {type(thing).__name__}, which {lacks}")
    return thing


def in_a_line(error: BaseException) -> str:
    """Of the user's error its kind and the first line: a message may hold a page."""
    message = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _imported(what: str, spec: str, name: str, attribute: str) -> Any:
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

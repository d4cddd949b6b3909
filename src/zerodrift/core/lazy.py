"""Public names of a package that are loaded when first used, so that importing the package costs no torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from zerodrift.core.errors import MissingExtra

LOCAL = frozenset({"hypothesis", "safetensors", "tokenizers", "torch", "transformers"})
"""What `zerodrift[local]` installs, as far as a public name needs it."""


def lazy(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for `package`; `modules` says which module defines each name."""

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            if error.name not in LOCAL:
                raise
            raise MissingExtra(
                f"{package}.{name} needs {error.name}, which is not installed: pip install 'zerodrift[local]'"
            ) from error

    return load

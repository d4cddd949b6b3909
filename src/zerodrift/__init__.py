"""Rollouts your RL trainer can trust. Everything public is importable from here, and loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerodrift.core.completion import Completion, LogprobContract, LogprobKind
    from zerodrift.core.request import Prompt, Request, SamplingParams

__version__ = "0.1.0"

# Public name -> module that defines it. Lazy, so that `import zerodrift` costs no torch (a test measures it).
_EXPORTS = {
    "Completion": "zerodrift.core.completion",
    "LogprobContract": "zerodrift.core.completion",
    "LogprobKind": "zerodrift.core.completion",
    "Prompt": "zerodrift.core.request",
    "Request": "zerodrift.core.request",
    "SamplingParams": "zerodrift.core.request",
}
_PACKAGES = ("models",)

__all__ = [
    "Completion",
    "LogprobContract",
    "LogprobKind",
    "Prompt",
    "Request",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name in _PACKAGES:
        return import_module(f"zerodrift.{name}")
    raise AttributeError(f"module 'zerodrift' has no attribute {name!r}")

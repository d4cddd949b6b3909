"""Rollouts your RL trainer can trust. Everything public is importable from here, and loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerodrift.core.lazy import lazy

if TYPE_CHECKING:
    from zerodrift.audit.facade import EquivalenceReport, EquivalenceValidator, ReferenceBaseline
    from zerodrift.core.completion import Completion, LogprobContract, LogprobKind
    from zerodrift.core.request import Prompt, Request, SamplingParams
    from zerodrift.engine.engine import Engine
    from zerodrift.engine.loop import EngineLoop
    from zerodrift.monitor.monitor import Monitor

__version__ = "0.1.0"

# Public name -> module that defines it. Lazy, so that `import zerodrift` costs no torch (a test measures it).
_EXPORTS = {
    "Completion": "zerodrift.core.completion",
    "Engine": "zerodrift.engine.engine",
    "EngineLoop": "zerodrift.engine.loop",
    "EquivalenceReport": "zerodrift.audit.facade",
    "EquivalenceValidator": "zerodrift.audit.facade",
    "LogprobContract": "zerodrift.core.completion",
    "LogprobKind": "zerodrift.core.completion",
    "Monitor": "zerodrift.monitor.monitor",
    "Prompt": "zerodrift.core.request",
    "ReferenceBaseline": "zerodrift.audit.facade",
    "Request": "zerodrift.core.request",
    "SamplingParams": "zerodrift.core.request",
}
_PACKAGES = ("exact", "models")
_load = lazy(__name__, _EXPORTS)

__all__ = [
    "Completion",
    "Engine",
    "EngineLoop",
    "EquivalenceReport",
    "EquivalenceValidator",
    "LogprobContract",
    "LogprobKind",
    "Monitor",
    "Prompt",
    "ReferenceBaseline",
    "Request",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"zerodrift.{name}")
    return _load(name)


def __dir__() -> list[str]:
    # What is for use, and not what this file is made of.
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})

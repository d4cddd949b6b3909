"""Ops whose bits depend on logical position alone, and the modules and forwards that are made of them.

    import zerodrift as zd
    model = zd.exact.prepare(zd.models.load("testbed:qwen3"))
    logprobs = zd.exact.token_logprobs(model, completions)      # differentiable, one tensor per completion

Names are loaded when first used. No module here has the name of a function below: importing such a module would
put it in the function's place.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerodrift.exact.experts import recorded_routing
    from zerodrift.exact.fingerprint import numeric_fingerprint
    from zerodrift.exact.logprobs import head, processed, token_logprobs
    from zerodrift.exact.paged import PagedBatch, PagedKV, forward_paged
    from zerodrift.exact.preparation import prepare, refresh, restore

_EXPORTS = {
    "PagedBatch": "zerodrift.exact.paged",
    "PagedKV": "zerodrift.exact.paged",
    "forward_paged": "zerodrift.exact.paged",
    "head": "zerodrift.exact.logprobs",
    "numeric_fingerprint": "zerodrift.exact.fingerprint",
    "prepare": "zerodrift.exact.preparation",
    "processed": "zerodrift.exact.logprobs",
    "recorded_routing": "zerodrift.exact.experts",
    "refresh": "zerodrift.exact.preparation",
    "restore": "zerodrift.exact.preparation",
    "token_logprobs": "zerodrift.exact.logprobs",
}
_LOCAL_EXTRA = frozenset({"torch", "transformers"})

__all__ = [
    "PagedBatch",
    "PagedKV",
    "forward_paged",
    "head",
    "numeric_fingerprint",
    "prepare",
    "processed",
    "recorded_routing",
    "refresh",
    "restore",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'zerodrift.exact' has no attribute {name!r}")
    try:
        return getattr(import_module(_EXPORTS[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in _LOCAL_EXTRA:
            raise
        missing_extra = import_module("zerodrift.core.errors").MissingExtra
        raise missing_extra(
            f"zerodrift.exact.{name} needs {error.name}, which is not installed: pip install 'zerodrift[local]'"
        ) from error

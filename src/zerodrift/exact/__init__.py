"""Ops whose bits depend on logical position alone, and the modules and forwards that are made of them.

    import zerodrift as zd
    model = zd.exact.prepare(zd.models.load("testbed:qwen3"))
    logprobs = zd.exact.token_logprobs(model, completions)      # differentiable, one tensor per completion

Names are loaded when first used. No module here has the name of a function below: importing such a module would
put it in the function's place.
"""

from typing import TYPE_CHECKING

from zerodrift.core.lazy import lazy

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

__getattr__ = lazy(__name__, _EXPORTS)

"""A vLLM plugin: `--weight-transfer-config '{"backend": "zerodrift"}'` takes weights out of a directory.

vLLM calls `register` in every one of its processes; nothing else is imported until a server asks for the engine.
"""

import logging

NAME = "zerodrift"

_log = logging.getLogger(__name__)


def register() -> None:
    """Offer the transfer engine to vLLM. A release without such engines serves as if this were not installed."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: PLC0415 - vLLM's, not ours
    except ImportError:
        _log.warning("this vLLM has no weight transfer engines, so the plugin %r has nothing to add", NAME)
        return
    try:
        WeightTransferEngineFactory.register_engine(NAME, "zerodrift_vllm.transfer", "DirectoryTransfer")
    except ValueError:
        # vLLM asks plugins to survive a second call in the same process, and its registry refuses one.
        _log.debug("the transfer engine %r is registered already", NAME)

"""A vLLM plugin: `--weight-transfer-config '{"backend": "zerodrift"}'` takes weights out of a directory.

vLLM calls `register` in every one of its processes; nothing else is imported until a server asks for the engine. A trainer
that lets vLLM's `WeightTransferTrainerFactory` send calls it once.
"""

import logging

NAME = "zerodrift"

_log = logging.getLogger(__name__)


def register() -> None:
    """Offer the transfer engine to vLLM. A release without such engines serves as if this were not installed."""
    from zerodrift_vllm.amx import ask_for_amx  # noqa: PLC0415 - torch, which a trainer's process may not have yet

    ask_for_amx()
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
        return
    _register_trainer()


def _register_trainer() -> None:
    """The side that sends, in a trainer's process: it calls `register` by itself."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415 - vLLM's, not ours
    except ImportError:
        _log.debug("this vLLM has no trainers' engines: write a directory and post its path")
        return
    WeightTransferTrainerFactory.register_engine(NAME, "zerodrift_vllm.trainer", "DirectoryTrainer")

"""Leave to use AMX, which Linux gives to a process that asks for it.

vLLM 0.32 on CPU computes attention in bf16 by AMX wherever the processor has it, and leaves the asking to whatever oneDNN
product happens to ask first. Where none does, as with small models, its worker dies at the first step of an illegal
instruction, and the client is told "EngineCore encountered an issue". `ONEDNN_MAX_CPU_ISA` below AMX ends it as well, at the
first prompt that is long enough for a product: that nobody but its user can mend.
"""

import logging

import torch

_log = logging.getLogger(__name__)


def ask_for_amx() -> None:
    """For this process and its threads; no number changes by it. Elsewhere than on such a processor nothing is done."""
    # Both are torch's own switches, private to it, and a release may come without them.
    has_amx, ask = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_init_amx"))
    if has_amx is not None and ask is not None and has_amx() and not ask():
        _log.warning(
            "the processor has AMX and the kernel gives no leave to use it: bf16 on CPU will end vLLM's worker"
        )

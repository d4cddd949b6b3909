"""What decides the bits of a prepared model, as text that two processes compare before they trust each other."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from zerodrift.core.errors import FingerprintMismatch
from zerodrift.exact.preparation import ops_of, parameters_on

STOP_IDS = "stop_ids"


def numeric_fingerprint(model: Any) -> dict[str, str]:
    """Op variants, block sizes, dtypes, instruction set and library versions. Thread counts are not among them:
    the bits do not depend on them, which is proven for each count before it is used."""
    ops = ops_of(model)
    device = parameters_on(model)
    return {
        "kernels": "zerodrift-exact-1",
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_dtype": "float32",
        "logprobs_dtype": "float32",
        "device": device.type,
        "threads": "any",
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        STOP_IDS: stop_ids_text(stop_ids_of(model)),
        **ops.facts(),
    }


def require_same(engine: Mapping[str, str], trainer: Mapping[str, str]) -> None:
    """Two processes compute alike, or `FingerprintMismatch` names what differs."""
    differing = {
        name: (engine.get(name), trainer.get(name))
        for name in sorted({*engine, *trainer})
        if engine.get(name) != trainer.get(name)
    }
    if differing:
        listed = "; ".join(
            f"{name} is {ours} in the engine and {theirs} in the trainer"
            for name, (ours, theirs) in differing.items()
        )
        raise FingerprintMismatch(
            f"{listed}: their logprobs are not the same bits; run both with the same numerics"
        )


def stop_ids_of(model: Any) -> tuple[int, ...]:
    """The tokens that end a sequence, which `min_tokens` forbids."""
    written = getattr(model, "generation_config", None)
    ids = getattr(written, "eos_token_id", None)
    ids = model.config.eos_token_id if ids is None else ids
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def stop_ids_text(ids: Sequence[int]) -> str:
    """As a fingerprint has them."""
    return ",".join(map(str, sorted(ids))) or "none"

"""Who computed: the engine's settings and numerics, named as in the other engines' fingerprints."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from zerodrift.core.completion import EngineFingerprint, LogprobKind
from zerodrift.core.frozen import freeze
from zerodrift.core.version import AdapterVersion
from zerodrift.engine.prompts import ServedFacts
from zerodrift.engine.sampler import LogprobsMode
from zerodrift.engine.scheduler import Scheduler
from zerodrift.exact.fingerprint import numeric_fingerprint


class Identity(msgspec.Struct, frozen=True):
    """Who computed: the same for all outputs between two swaps."""

    kind: LogprobKind
    fingerprint: str
    numeric: Mapping[str, str]

    def __post_init__(self) -> None:
        """Shared by all outputs, so nobody may change it."""
        freeze(self, "numeric")


def fingerprint_of(
    model: Any,
    scheduler: Scheduler,
    facts: ServedFacts,
    mode: LogprobsMode,
    adapters: Sequence[AdapterVersion] = (),
) -> EngineFingerprint:
    """Of an engine between two swaps."""
    limits = scheduler.limits
    return EngineFingerprint(
        engine="exact",
        semantic={
            "logprobs_mode": mode.value,
            "generation_config": "vllm",
            "hf_overrides": "{}",
            "lora": ", ".join(f"{each.name} {each.digest}" for each in adapters) or "null",
            "weights": scheduler.version.digest or "unknown",
        },
        numeric=numeric_fingerprint(model),
        deployment={
            "max_model_len": str(facts.max_model_len),
            "block_size": str(limits.block_size),
            "num_blocks": str(limits.num_blocks),
            "max_num_seqs": str(limits.max_num_seqs),
            "max_num_batched_tokens": str(limits.max_num_batched_tokens),
            "enable_prefix_caching": str(limits.prefix_caching).lower(),
        },
    )

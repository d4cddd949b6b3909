"""One digest for a LoRA adapter and the base that it stands beside, equal on every side that holds the same bits."""

import hashlib

from zerodrift.models.lora import LoraPairs
from zerodrift.weights.listing import manifest_of


def adapter_digest(base: str, pairs: LoraPairs) -> str:
    """sha256 over the base's digest, A, B and the scale of every layer.

    Without the base it would be no name for what is computed: the same A and B beside other weights are another model.
    """
    state = {}
    for place, pair in pairs.items():
        state[f"{place}.lora_A"], state[f"{place}.lora_B"] = pair.down_RI, pair.up_OR
    scales = " ".join(f"{place}={float(pairs[place].scale).hex()}" for place in sorted(pairs))
    return hashlib.sha256(f"{base} {manifest_of(state).digest} {scales}".encode()).hexdigest()

"""LoRA adapters that clients load and then ask for as models, by vLLM's routes.

Each version that a client loads is a version of the engine's, and a request keeps the one that it began with: a name that is
unloaded, or given to another adapter, is gone for new requests at once, and what runs is let go with its last request. vLLM
keys its prefix cache by the name; here it is the digest of base, A, B and scale, so no request reads another adapter's KV.
"""

from typing import Any

import torch

from zerodrift.core.errors import CapabilityMissing, ModelError, UnsupportedModel
from zerodrift.core.version import AdapterVersion
from zerodrift.engine.loop import EngineLoop
from zerodrift.serve.settings import ServeSettings
from zerodrift.weights.adapter_folder import AdapterFolder
from zerodrift.weights.folder import TensorBytes

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ServedAdapters:
    """Of one engine. Any thread."""

    def __init__(self, loop: EngineLoop, settings: ServeSettings) -> None:
        self._loop, self._limits = loop, settings.limits
        self._root = None if settings.weight_root is None else settings.weight_root.resolve(strict=True)

    @property
    def versions(self) -> tuple[AdapterVersion, ...]:
        """What may be asked for now."""
        return self._loop.engine.adapters.versions

    @property
    def config(self) -> dict[str, Any] | None:
        """As vLLM's `lora_config`; None where none are taken, which is how TRL finds out."""
        if self._root is None:
            return None
        return {"max_loras": self._limits.loras, "max_lora_rank": self._limits.lora_rank}

    def load(self, name: str, path: str, *, replace: bool) -> AdapterVersion:
        """Serve the adapter at `path` as `name`; one that has the name is refused, or gives it up."""
        tensors, config = self._read(path)
        return self._loop.load_adapter(name, tensors, config, replace=replace, most=self._limits.loras)

    def unload(self, name: str) -> None:
        """No new request may ask for it."""
        self._loop.unload_adapter(name, in_use="keep")

    def _read(self, path: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if self._root is None:
            raise CapabilityMissing(
                "this server was started without --weight-root DIR, and takes no adapters"
            )
        folder = AdapterFolder(self._root, path)
        try:
            config = folder.config()
            rank = config.get("r")
            if not isinstance(rank, int) or not 1 <= rank <= self._limits.lora_rank:
                raise UnsupportedModel(
                    f"the adapter has rank {str(rank)[:20]}; this server takes 1 to {self._limits.lora_rank} (--max-lora-rank)"
                )
            known = self._loop.engine.model.state_dict()
            # A and B of every tensor at this rank, as wide as doubles: no adapter of this model is larger.
            most = sum(8 * rank * sum(tensor.shape) for tensor in known.values() if tensor.dim() > 1)
            return {each.name: _tensor(each) for each in folder.plain_tensors(most)}, config
        finally:
            folder.close()


def _tensor(read: TensorBytes) -> torch.Tensor:
    dtype = getattr(torch, read.stored.dtype.name)
    if dtype not in _FLOATS:
        raise ModelError(f"{read.name[:80]} is {dtype}; adapters are floating point")
    content = bytearray(read.content)
    tensor = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return tensor.reshape(read.stored.shape)

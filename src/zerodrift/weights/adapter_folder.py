"""A LoRA adapter below one root, as PEFT saves one: read without following a link, and copied out. Torch-free.

ROOT/any/where/adapter_config.json
              /adapter_model.safetensors
"""

from typing import Any

import msgspec

from zerodrift.core.errors import ModelError, NoWeights
from zerodrift.weights.checkpoint_folder import CheckpointFolder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_CONFIG_BYTES = 2**20
"""The largest that PEFT writes lists the modules that it is beside: some kilobytes."""


class AdapterFolder(CheckpointFolder):
    """One directory, open."""

    def config(self) -> dict[str, Any]:
        """What PEFT wrote of its settings."""
        where = f"{self.where}/{CONFIG}"
        try:
            return msgspec.json.decode(bytes(self._read(CONFIG, MOST_CONFIG_BYTES)), type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ModelError(f"{where} cannot be read: {error}") from error

    def _files(self) -> dict[str, set[str] | None]:
        if lacking := {CONFIG, WEIGHTS} - {*self._there()}:
            raise NoWeights(
                f"{self.where} has no {min(lacking)}, so it holds no adapter; write it with save_pretrained of peft"
            )
        return {WEIGHTS: None}

"""vLLM's four-phase weight update, out of a directory instead of a GPU.

init → start → update (any number of times) → finish. Everything is checked while it is sent, and the model is
touched in finish alone, so an update that is refused leaves the old weights serving. vLLM publishes the new
version label only after finish has returned.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from zerodrift_vllm.checkpoint import Checkpoint, Shape
from zerodrift_vllm.ties import Ties
from zerodrift_vllm.update import Update

TIED_HEAD = "lm_head.weight"
"""A copy of the embeddings where those are tied: some writers leave it out, and vLLM does not read it."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What `init_info` may say."""

    checkpoint: str | None = None
    """Directory with the tensors that the model is made of; None: the one that is served."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What `update_info` must say."""

    directory: str
    names: list[str] | None = None
    """None: all of the directory."""


class DirectoryTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Reads what it is told to from a file system that it shares with the trainer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    """The tensors of a draft model are not known here, so nothing could be checked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Called when the model has just been loaded, so its directory still is what it was loaded from."""
        super().__init__(*args, **kwargs)
        self._known: Mapping[str, Shape] = {}
        self._why_unknown = ""
        try:
            self._known = Checkpoint(self.model_config.model).shapes
        except ValueError as error:
            # Served by its name on a hub, or out of other files. That is no fault yet: init may say more.
            self._why_unknown = str(error)
        self._update: Update | None = None
        self._torn = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing is connected; may be called again."""
        if init_info.checkpoint is not None:
            self._known = Checkpoint(init_info.checkpoint).shapes

    def start_weight_update(self) -> None:
        """Forget what was sent before; the model is not touched."""
        self._refuse_torn()
        if not self._known:
            raise ValueError(
                f"the tensors of the served model are not known here ({self._why_unknown}); initialise with "
                '{"init_info": {"checkpoint": DIRECTORY}} of the same model'
            )
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        self._update = Update(self._known, [TIED_HEAD] if tied else [])

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check and keep. vLLM's own would wait for an accelerator afterwards, and a CPU has none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Headers are read and compared with the model's; the tensors stay on disk until finish."""
        assert self._update is not None, "vLLM's worker refuses an update that was not started"
        self._update.add(Checkpoint(update_info.directory), update_info.names)

    def finish_weight_update(self) -> None:
        """Apply. Where this raises, vLLM keeps its version label."""
        assert self._update is not None, "vLLM's worker refuses to finish what was not started"
        self._refuse_torn()
        self._update.check()
        # From here on an error leaves layers without memory: vLLM fails at the next request, and never answers
        # with a mixture.
        self._torn = True
        ties = Ties(self.model)
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(self._update.tensors())
        self._check_arrived(ties, loaded)
        finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and self.model_config.quantization is None:
            ties.prepare_followers(loaded)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self._torn = False
        self._update = None

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """vLLM 0.26 makes no engine without it; later releases have the trainer's side elsewhere."""
        raise NotImplementedError("the trainer writes a directory, and posts its path to /update_weights")

    def shutdown(self) -> None:
        """Let go of the files."""
        self._update = None

    def _refuse_torn(self) -> None:
        # Also in finish: vLLM keeps the broken update open, and tells whoever starts the next one to finish it.
        if self._torn:
            raise RuntimeError(
                "an update broke off while it was applied: the model is neither the old nor the new one; "
                "restart the server"
            )

    def _check_arrived(self, ties: Ties, loaded: set[str] | None) -> None:
        """A parameter that no tensor was for would keep its old value, and vLLM would log a line.

        Quantised models have parameters that are computed, and some models do not say what they loaded.
        """
        assert self._update is not None
        if loaded is None or self.model_config.quantization is not None or not self._update.whole:
            return
        if left := ties.unreached(loaded):
            raise RuntimeError(f"{len(left)} parameters of the model were not loaded, {left[0]} among them")

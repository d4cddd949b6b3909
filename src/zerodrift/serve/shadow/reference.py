"""The trainer's model beside the proxy: its weights follow the updates that can be read, and it scores what the engine said."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from zerodrift.backends.reference import load_reference
from zerodrift.backends.teacher import Teacher
from zerodrift.core.errors import ModelError
from zerodrift.serve.weight_updates import tensor_of
from zerodrift.weights.checkpoint_folder import CheckpointFolder
from zerodrift.weights.digest import checkpoint_state

Weights = Mapping[str, torch.Tensor]


class ShadowReference:
    """`read` is for any thread; `switch` and `score` are for one."""

    def __init__(self, spec: str | Path, dtype: str, root: Path | None) -> None:
        """`root`: below which updates are read; None: none are."""
        self.model = load_reference(spec, dtype).model
        self._teacher = Teacher(self.model)
        self.vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        self._root = None if root is None else root.resolve(strict=True)

    def read(self, path: str) -> Weights:
        """A whole checkpoint of this model, in its dtype without rounding."""
        if self._root is None:
            raise ModelError("there is no --weight-root DIR below which updates are read")
        known = self.model.state_dict()
        folder = CheckpointFolder(self._root, path)
        try:
            most = 2 * sum(8 * tensor.numel() for tensor in known.values())
            found = folder.tensors(folder.manifest()) if folder.has_manifest else folder.plain_tensors(most)
            tensors = {each.name: tensor_of(each, known) for each in found}
        finally:
            folder.close()
        own = checkpoint_state(self.model)
        if lacking := own.keys() - tensors.keys():
            raise ModelError(
                f"the update has no {min(lacking)!r}; a whole checkpoint is needed to score by it"
            )
        for name in tensors.keys() - own.keys():
            # Tied: written out a second time, it must say the same.
            source = next(each for each in own if known[each].data_ptr() == known[name].data_ptr())
            if not torch.equal(tensors[name], tensors[source]):
                raise ModelError(f"the update unties {name!r} from {source!r}, which this model has tied")
        return tensors

    @torch.no_grad()
    def switch(self, weights: Weights) -> None:
        """To what `read` gave."""
        for name, tensor in checkpoint_state(self.model).items():
            tensor.copy_(weights[name])

    def score(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Raw logprobs of `tokens` behind `prompt`."""
        ids = [*prompt, *tokens]
        if not prompt or not all(0 <= token < self.vocab_size for token in ids):
            raise ModelError(f"ids beyond a vocabulary of {self.vocab_size}, or no prompt: another model's")
        [scores] = self._teacher.logprobs([ids], [len(prompt)])
        return [float(each) for each in scores]

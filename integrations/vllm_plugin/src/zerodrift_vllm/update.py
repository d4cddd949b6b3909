"""Which tensors make an update, and is it one that may be applied? Decided before the model is touched.

vLLM reloads a layer from nothing: of fused tensors (q, k, v) that do not all come, the rest would be uninitialised
memory, and it would say nothing. So a layer comes whole, or is refused.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import torch

from zerodrift_vllm.checkpoint import Checkpoint, Shape

SHOWN = 3
"""Names in a message; a wrong directory has hundreds."""


class Update:
    """What was sent since the update started."""

    def __init__(self, model: Mapping[str, Shape], optional: Collection[str] = ()) -> None:
        """`model` is what the served checkpoint holds; `optional` what of it an update may leave out."""
        self._model = model
        self._optional = frozenset(optional)
        self._sources: dict[str, Checkpoint] = {}

    @property
    def whole(self) -> bool:
        """Nothing of the model keeps its old value."""
        return self._model.keys() - self._optional <= self._sources.keys()

    def add(self, sent: Checkpoint, names: Collection[str] | None) -> None:
        """Take `names` of a checkpoint, or all of it, which must then be the whole model. All or none is taken."""
        asked = sent.shapes.keys() if names is None else set(names)
        _refuse(asked - sent.shapes.keys(), f"not in {sent.directory}")
        _refuse(asked - self._model.keys(), "not in the model that is served")
        if names is None:
            _refuse(
                self._model.keys() - self._optional - asked,
                f"missing in {sent.directory}; to send a part, say which by `names`",
            )
        _refuse(
            {name for name in asked if sent.shapes[name] != self._model[name]},
            "of another shape in the model",
        )
        _refuse(asked & self._sources.keys(), "sent twice in one update")
        if not asked:
            raise ValueError("an update of no tensors was sent")
        self._sources |= dict.fromkeys(asked, sent)

    def check(self) -> None:
        """Something was sent, and no layer is in pieces."""
        if not self._sources:
            raise ValueError("nothing was sent since the update started; the weights are what they were")
        parts: dict[str, set[str]] = defaultdict(set)
        for name in self._model.keys() - self._optional:
            parts[part(name)].add(name)
        for name in {part(name) for name in self._sources}:
            _refuse(parts[name] - self._sources.keys(), f"missing, while others of {name} were sent")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """In the order of the names, which keeps a layer's tensors together."""
        for name in sorted(self._sources):
            yield name, self._sources[name].read(name)


def part(name: str) -> str:
    """What must come together: the outermost numbered block of a tensor, or the module that owns it.

    >>> part("model.layers.3.mlp.experts.7.up_proj.weight"), part("lm_head.weight")
    ('model.layers.3', 'lm_head')
    """
    words = name.split(".")
    number = next((i for i, word in enumerate(words) if word.isdecimal()), len(words) - 2)
    return ".".join(words[: number + 1])


def _refuse(names: Collection[str], why: str) -> None:
    if names:
        shown = ", ".join(sorted(names)[:SHOWN]) + (", …" if len(names) > SHOWN else "")
        raise ValueError(f"{why}: {shown} ({len(names)} in all)")

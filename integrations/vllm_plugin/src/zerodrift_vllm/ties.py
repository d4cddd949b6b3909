"""Which parameters are one tensor under several names? An update brings such a tensor once.

vLLM takes every module apart while it reloads, and each then has a parameter of its own, which nothing is loaded into at
the other end of a tie. Its own bookkeeping puts the shared tensor back; so what is shared is looked up before.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import Any


class Ties:
    """The parameters of a model by all of their names, as they were before an update."""

    def __init__(self, model: Any) -> None:
        """`model` is a torch module."""
        self._model = model
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        self._names = list(names.values())

    def unreached(self, loaded: Collection[str]) -> list[str]:
        """Parameters that nothing was loaded into under any of their names, each by its first."""
        return sorted(names[0] for names in self._names if not any(name in loaded for name in names))

    def prepare_followers(self, loaded: Collection[str]) -> None:
        """What a module made of its weights is made again where those came through a tie.

        On a CPU vLLM packs the weights of a head for oneDNN when they are loaded into it, and not when the embedding that it
        is tied to changes: it would go on with the old ones.
        """
        followers = (
            name
            for names in self._names
            if any(name in loaded for name in names)
            for name in names
            if name not in loaded
        )
        for name in followers:
            module = self._model.get_submodule(name.rpartition(".")[0])
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(module)

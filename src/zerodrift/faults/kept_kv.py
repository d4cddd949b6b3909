"""A request in flight when weights change goes on over the keys and values that the old ones wrote, and nobody says so.

Engines that update without a pause do that on purpose (PipelineRL keeps the KV, and found it only slightly worse than computing it
anew), and then say which weights wrote what. This one labels all of it with the new version. Whoever asks it waits for every
answer before it sends weights, so what would have been in flight is played: the first sequences after an update have their prompt
and first token by the weights from before.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerodrift.backends.base import Backend
from zerodrift.core.version import WeightVersion
from zerodrift.faults.wrapper import FaultyBackend, Plant, clone, the_reference

IN_FLIGHT = 64
"""Sequences that an update meets: a third of a step of 25 prompts with 8 answers each, as on an engine that is never drained."""
_BEFORE = 1
"""Forwards by the old weights: the prompt, which gives the first token."""


class _GoesOn:
    """A model for the reference: of the next sequences the first forward is the old weights'."""

    def __init__(self, before: Any, after: Any) -> None:
        self.before, self.after = before, after
        self._left, self._calls, self._cache = IN_FLIGHT, 0, None
        self._old = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.after, name)

    def __call__(self, ids_BL: Any, **options: Any) -> Any:
        """As `sample` calls it: a cache that was not seen before begins other sequences."""
        cache = options["past_key_values"]
        if cache is None or cache is not self._cache:
            self._old, self._calls = self._left > 0, 0
            self._left -= len(ids_BL)
        model = self.before if self._old and self._calls < _BEFORE else self.after
        self._calls += 1
        output = model(ids_BL, **options)
        self._cache = output.past_key_values
        return output


class KeptKV(FaultyBackend):
    """Every update meets sequences in flight."""

    inside = True

    def __init__(self, engine: Backend) -> None:
        super().__init__(clone(engine))

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """Scores are the new weights' own: what scores has nothing in flight."""
        before = _plain(the_reference(self.inner).model)
        self.inner.load_weights(directory, version)
        reference = the_reference(self.inner)
        reference.model = _GoesOn(before, _plain(reference.model))


def _plain(model: Any) -> Any:
    """Of a model that went on from older weights, the newer ones."""
    return model.after if isinstance(model, _GoesOn) else model


KEPT_KV_FAULTS: Mapping[str, Plant] = {"weights/torn:kv-kept": KeptKV}

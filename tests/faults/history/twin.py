"""An engine to break: a twin of the reference engine, so that the one handed in stays healthy.

Version, label and fingerprint stay those of a sound engine: none of these bugs announced itself.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.wrapper import FaultyBackend, clone, the_reference

Reload = Callable[[Any, Any], None]
"""(model that ran before the update, model with all of the update) : the latter is changed in place."""


class Twin(FaultyBackend):
    """Shares today's weights with the engine it was made from, and nothing later."""

    inside: ClassVar[bool] = True

    def __init__(self, engine: Backend) -> None:
        twin = clone(engine)
        super().__init__(twin)
        self.reference: ReferenceBackend = the_reference(twin)

    def own_model(self) -> Any:
        """A copy of the model, which the engine runs from here on and which may be changed."""
        self.run(copy.deepcopy(self.reference.model))
        return self.reference.model

    def run(self, model: Any) -> None:
        """Generate and score with this model."""
        self.reference.model = model
        self.reference.teacher = copy.copy(self.reference.teacher)
        self.reference.teacher.model = model


class Reloading(Twin):
    """Healthy until weights are loaded; then `reload` has its way with the new model."""

    def __init__(self, engine: Backend, reload: Reload) -> None:
        super().__init__(engine)
        self._reload = reload

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """The right weights first, so that their digest is what the engine shows."""
        before = self.reference.model
        super().load_weights(directory, version)
        self._reload(before, self.reference.model)


class Reporting(Twin):
    """Samples rightly, and rewrites each completion."""

    def rewrite(self, request: Request, completion: Completion) -> Completion:
        """What goes out in place of it."""
        raise NotImplementedError

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Every completion rewritten."""
        return [
            msgspec.structs.replace(
                answer, completions=tuple(self.rewrite(request, each) for each in answer.completions)
            )
            for request, answer in zip(requests, super().generate(requests), strict=True)
        ]

"""An engine in this process whose numbers are measured, as those of a server are: vanilla transformers, or one with planted faults.

Faults are planted before the weights of their step are sent, so that one which acts in updates takes part in that one.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.run import RunConfig
from zerodrift.config.training import RolloutsFrom
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.fault import Fault, Need
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.train.planted import faults_of
from zerodrift.train.records import version_number


class MeasuredEngine(FaultyBackend):
    """Sound up to the weights of step `since`, and with `faults` from there. It tells no digests, as a vLLM does not."""

    def __init__(self, engine: ExactBackend | ReferenceBackend, faults: Sequence[Fault], since: int) -> None:
        """What could not be planted when its time comes is refused now."""
        super().__init__(engine)
        for fault in faults:
            fault.require_plantable(engine)
        self._faults, self._since, self._planted = faults, since, False

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Versions by their labels alone."""
        return [
            msgspec.structs.replace(answer, completions=tuple(map(_without_digests, answer.completions)))
            for answer in super().generate(requests)
        ]

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """The faults first, where their step has come. The exact engine would refuse weights of another digest than it is told."""
        if not self._planted and version_number(version) >= self._since:
            for fault in self._faults:
                self.inner = fault.inject(self.inner)
            self._planted = True
        super().load_weights(directory, WeightVersion(version.label))

    def reset_cache(self) -> None:
        """Left out where the fault is that nobody does."""
        if not self._planted or not any(Need.KEPT_CACHE in fault.needs for fault in self._faults):
            super().reset_cache()


def measured_engine(config: RunConfig) -> MeasuredEngine:
    """As `train.rollouts`, `train.inject` and `train.inject_from` say."""
    faults = faults_of(config)
    kind = ReferenceBackend if config.train.rollouts is RolloutsFrom.REFERENCE else ExactBackend
    for fault in faults:
        fault.check_visible(config.sampling_defaults.params(), engine=kind.name, sync=True, trains=True)
    dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
    return MeasuredEngine(kind(config.model.path or "", dtype=dtype), faults, config.train.inject_from)


def _without_digests(completion: Completion) -> Completion:
    versions = tuple(
        msgspec.structs.replace(span, version=WeightVersion(span.version.label))
        for span in completion.versions
    )
    return msgspec.structs.replace(completion, versions=versions)

"""Where rollouts come from: one protocol, and the exact engine in this process behind it; servers are in `served.py`.

A source is asked for a group and answers later, while the learner learns. Weights are published to it as a transaction: all
of them verified, or none. What comes back is held against what was published, so that an engine which serves other weights
than it was given is found by its first answer.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from zerodrift.config.training import UpdateKV
from zerodrift.core.completion import FinishReason
from zerodrift.core.errors import EngineError, VersionConflict
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.engine.engine import Engine
from zerodrift.engine.handle import RequestHandle
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.output import Output, require_served
from zerodrift.engine.updates import Updates
from zerodrift.engine.weights import StagedWeights
from zerodrift.sync.publisher import WeightPublisher
from zerodrift.sync.target import InProcess
from zerodrift.train.records import version_label, version_number, versions_of


class RolloutSource(Protocol):
    """An engine, as the training loop sees it."""

    exact: bool
    """Whether its numbers are the trainer's, bit for bit; those of another are measured."""

    @property
    def version(self) -> WeightVersion:
        """That serves."""
        ...

    @property
    def model(self) -> Any:
        """One with the shape of every version."""
        ...

    def submit(self, index: int, prompt: Prompt, sampling: SamplingParams) -> None:
        """Ask for a group, and return at once."""
        ...

    def done(self, index: int) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self, index: int) -> tuple[tuple[Output, ...], int]:
        """The group, when it is there, and the version that served when it was asked for. Once for each."""
        ...

    def publish(self, number: int) -> WeightVersion:
        """Serve the trainer's weights as those of `number` steps; as before, where this raises, or nothing is asked any more."""
        ...

    def has(self, version: WeightVersion) -> bool:
        """Whether the weights of a version are still kept."""
        ...

    def weights_of(self, version: WeightVersion) -> StagedWeights:
        """Of a version that is kept, verified again."""
        ...

    def close(self) -> None:
        """End it; what is in flight is aborted, or waited for where it is a server's."""
        ...


class ExactSource:
    """The exact engine on a thread of its own. `directory` holds weights of the last versions, and is made anew."""

    exact = True

    def __init__(
        self, model: Any, tokenizer: Any, directory: Path, *, first: int, kv: UpdateKV, max_lag: int
    ) -> None:
        """`model` is the trainer's, at `first` steps; the engine takes a copy."""
        shutil.rmtree(directory, ignore_errors=True)
        self.engine = Engine(model, tokenizer=tokenizer, version=version_label(first))
        self._loop = EngineLoop(self.engine)
        try:
            # The version of the oldest token that may be learnt from, up to the one that is being published.
            self._updates = Updates(self._loop, directory, retain=max_lag + 2)
            self._publisher = WeightPublisher(model, [InProcess(self._updates, kv=kv)])
        except BaseException:
            self._loop.stop(drain=False)
            raise
        self._number = first
        self._published = {first: self._updates.current}
        self._flying: dict[int, tuple[RequestHandle, SamplingParams, int]] = {}

    @property
    def version(self) -> WeightVersion:
        """That serves."""
        return self._updates.current

    @property
    def model(self) -> Any:
        """The engine's own."""
        return self.engine.model

    def submit(self, index: int, prompt: Prompt, sampling: SamplingParams) -> None:
        """Under an id that says which group it is."""
        handle = self._loop.submit(prompt, sampling, request_id=f"g{index}", stream_text=False)
        self._flying[index] = (handle, sampling, self._number)

    def done(self, index: int) -> bool:
        """Finished, or failed."""
        return self._flying[index][0].done

    def result(self, index: int) -> tuple[tuple[Output, ...], int]:
        """All samples, each whole, and of weights that this source was given."""
        handle, sampling, asked_at = self._flying[index]
        outputs = tuple(handle.result())
        del self._flying[index]
        require_served(outputs)
        if len(outputs) != sampling.n or any(each.finish_reason is FinishReason.ABORT for each in outputs):
            raise EngineError(
                f"group {index} came back with {len(outputs)} outputs, or some that were aborted"
            )
        self._check_versions(index, outputs, asked_at)
        return outputs, asked_at

    def publish(self, number: int) -> WeightVersion:
        """Between two steps of the engine; where requests in flight are drained, after the last of them."""
        self._publisher.publish(version_label(number), parent=self.version)
        self._number = number
        self._published[number] = self.version
        return self.version

    def has(self, version: WeightVersion) -> bool:
        """Whether its weights are still kept."""
        return version in self._updates.retained

    def weights_of(self, version: WeightVersion) -> StagedWeights:
        """Of a version that is kept, verified again."""
        return self._updates.weights_of(version)

    def close(self) -> None:
        """Twice does no harm."""
        self._loop.stop(drain=False)
        self._updates.close()

    def _check_versions(self, index: int, outputs: Sequence[Output], asked_at: int) -> None:
        for version in {version for output in outputs for version in versions_of(output)}:
            number = version_number(version)
            if number < asked_at or self._published.get(number) != version:
                raise VersionConflict(
                    f"group {index} was asked for at {version_label(asked_at)!r}, and {version.label!r} with digest "
                    f"{version.digest} made some of it, which is not what was published; nothing was trained on"
                )

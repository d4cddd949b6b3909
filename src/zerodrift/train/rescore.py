"""Does the trainer compute what the engine reported? Under the weights that made each token, and bit by bit where it is exact.

fresh    made by the weights that learn: the forward that learns has computed it already
old      made by one earlier version: the trainer's forward over that version's weights
mixed    weights changed while it was in flight: drawn again, token by token, over the KV that it looked back on

Of an exact engine a bit that differs stops the training before the batch is learnt from. Of any other the difference is
measured, for the record and for the monitor, which has the gate.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from zerodrift.core.errors import BitsDiffer
from zerodrift.core.version import WeightVersion
from zerodrift.engine.output import Output
from zerodrift.engine.replay import check_replay
from zerodrift.exact.logprobs import token_logprobs
from zerodrift.train.records import output_id, versions_of
from zerodrift.train.source import ExactSource, RolloutSource


class RescoredBatch(NamedTuple):
    """What came of one batch."""

    tokens: int
    """That were scored again."""
    mean: float | None
    """Of |engine - trainer| over those, in nats; None where there are none."""
    largest: float | None
    values: list[float]
    """Of every token: the trainer's number under the weights that made it, and the engine's own where it was not scored again."""
    scored: list[bool]
    """Which outputs were."""


class Rescorer:
    """Of one source; the weights of older versions are those that the source has kept."""

    def __init__(self, source: RolloutSource) -> None:
        """`source` lends the shape of its model."""
        self._source = source
        self._models: dict[WeightVersion, Any] = {}

    def check(
        self, outputs: Sequence[Output], learnt: Sequence[torch.Tensor], current: WeightVersion, one_in: int
    ) -> RescoredBatch:
        """Compare all that is fresh, and one in so many of the others."""
        self._models = {
            version: model for version, model in self._models.items() if self._source.has(version)
        }
        found: list[torch.Tensor | None] = []
        for place, (output, ours) in enumerate(zip(outputs, learnt, strict=True)):
            sampled = place % one_in == 0 and all(map(self._source.has, versions_of(output)))
            fresh = versions_of(output) == {current}
            found.append(ours if fresh else self._of_older(output) if sampled else None)
            if self._source.exact and (row := found[-1]) is not None:
                require_same(output, row)
        return _rescored(outputs, found)

    def draw_again(self, outputs: Sequence[Output]) -> RescoredBatch:
        """Every token of every output, by the noise it was drawn with."""
        for output in outputs:
            self._drawn_again(output)
        return _rescored(outputs, [torch.tensor(output.logprobs) for output in outputs])

    def _of_older(self, output: Output) -> torch.Tensor:
        if len(versions := versions_of(output)) == 1:
            return self._of_version(versions.pop(), output)
        self._drawn_again(output)
        return torch.tensor(output.logprobs)

    def _drawn_again(self, output: Output) -> None:
        assert isinstance(self._source, ExactSource), "groups of a server are drained, and not replayed"
        check_replay(self._source.engine, output, self._source.weights_of)

    @torch.no_grad()
    def _of_version(self, version: WeightVersion, output: Output) -> torch.Tensor:
        if version not in self._models:
            self._models[version] = self._source.weights_of(version).twin_of(self._source.model)
        (found,) = token_logprobs(self._models[version], [output])
        return found


def _rescored(outputs: Sequence[Output], found: Sequence[torch.Tensor | None]) -> RescoredBatch:
    engine = [torch.tensor(output.logprobs, dtype=torch.float64) for output in outputs]
    scored = [row is not None for row in found]
    trainer = [theirs if row is None else row.double() for row, theirs in zip(found, engine, strict=True)]
    values = [value for row in trainer for value in row.tolist()]
    apart = [ours - theirs for ours, theirs, counts in zip(trainer, engine, scored, strict=True) if counts]
    if not apart:
        return RescoredBatch(0, None, None, values, scored)
    sizes = torch.cat(apart).abs()
    return RescoredBatch(len(sizes), float(sizes.mean()), float(sizes.max()), values, scored)


def require_same(output: Output, ours: torch.Tensor) -> None:
    """The same bits, token by token."""
    theirs = torch.tensor(output.logprobs, dtype=ours.dtype)
    if torch.equal(theirs, ours):
        return
    place = int((theirs != ours).nonzero()[0])
    raise BitsDiffer(
        f"token {place} of {output_id(output)[0]} has logprob {output.logprobs[place]!r} by the engine and "
        f"{ours[place].item()!r} by the trainer under the same weights; the batch was not learnt from"
    )

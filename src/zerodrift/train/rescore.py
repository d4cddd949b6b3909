"""Does the trainer compute what the engine reported? Bit by bit, under the weights that made each token.

fresh    made by the weights that learn: the forward that learns has computed it already
old      made by one earlier version: the trainer's forward over that version's weights
mixed    weights changed while it was in flight: drawn again, token by token, over the KV that it looked back on

A bit that differs stops the training before the batch is learnt from.
"""

from collections.abc import Sequence
from typing import Any

import torch

from zerodrift.core.errors import BitsDiffer
from zerodrift.core.version import WeightVersion
from zerodrift.engine.output import Output
from zerodrift.engine.replay import check_replay
from zerodrift.exact.logprobs import token_logprobs
from zerodrift.train.records import output_id, versions_of
from zerodrift.train.source import ExactSource


class Rescorer:
    """Of one source; the weights of older versions are those that the source has kept."""

    def __init__(self, source: ExactSource) -> None:
        """`source` lends the shape of its model."""
        self._source = source
        self._models: dict[WeightVersion, Any] = {}

    def check(
        self, outputs: Sequence[Output], learnt: Sequence[torch.Tensor], current: WeightVersion, one_in: int
    ) -> list[bool]:
        """Compare all that is fresh, and one in so many of the others; says which were compared."""
        self._models = {
            version: model for version, model in self._models.items() if self._source.has(version)
        }
        compared = [False] * len(outputs)
        for place, (output, ours) in enumerate(zip(outputs, learnt, strict=True)):
            versions = versions_of(output)
            if versions == {current}:
                require_same(output, ours)
            elif place % one_in or not all(map(self._source.has, versions)):
                continue
            elif len(versions) == 1:
                require_same(output, self._of_version(versions.pop(), output))
            else:
                check_replay(self._source.engine, output, self._source.weights_of)
            compared[place] = True
        return compared

    def draw_again(self, outputs: Sequence[Output]) -> list[bool]:
        """Every token of every output, by the noise it was drawn with."""
        for output in outputs:
            check_replay(self._source.engine, output, self._source.weights_of)
        return [True] * len(outputs)

    @torch.no_grad()
    def _of_version(self, version: WeightVersion, output: Output) -> torch.Tensor:
        if version not in self._models:
            self._models[version] = self._source.weights_of(version).twin_of(self._source.engine.model)
        (found,) = token_logprobs(self._models[version], [output])
        return found


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

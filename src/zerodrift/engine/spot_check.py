"""Are the bits still the trainer's? One in so many finished samples is scored again while the engine runs.

The other path is the trainer's own: the sample alone, its whole sequence in one forward. A proof at start-up asks what
somebody thought of; this asks what really runs. A differing bit stops the engine, with the first op that differs.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from zerodrift.core import require
from zerodrift.core.completion import FinishReason
from zerodrift.core.errors import BitsDiffer, InvalidValue
from zerodrift.engine.output import Output
from zerodrift.engine.sample import Sample
from zerodrift.exact.first_difference import first_difference
from zerodrift.exact.verification import PromptThenTokens, rescored

CHECK_INTERVAL = {"cpu": 64, "cuda": 512}
"""One in so many finished samples, by device. Every 64th costs a fiftieth of a CPU's time (docs/engine.md) and a fifteenth of
an H200's, which waits for the host while one sequence is forwarded alone: 70 ms at the shape of Qwen3-0.6B."""
COMPANY = 7
"""Other sequences to repeat a differing sample with: an op may be wrong only for several at once."""


class SpotCheck:
    """Counts samples that come to their end, and looks at every `interval`-th."""

    def __init__(self, interval: int | None, block_size: int, device: str) -> None:
        """An `interval` of 0 looks at none; None is the device's own."""
        interval = CHECK_INTERVAL[device] if interval is None else interval
        rule = "one in so many finished samples is scored again, and 0 scores none"
        require.whole(InvalidValue, "logprob_check_interval", interval, rule, 0)
        self.interval = interval
        self.checked = 0
        self.skipped = 0
        """Samples whose turn it was, and some of whose tokens saw KV of more than one set of weights."""
        self.seconds = 0.0
        self._block_size = block_size
        self._ended = 0

    def look(self, model: Any, sample: Sample, output: Output, beside: Sequence[Sample]) -> None:
        """Raise `BitsDiffer` if it is this sample's turn and a bit differs; `beside` ran with it."""
        if not self.interval or output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._ended += 1
        if self._ended % self.interval:
            return
        if sample.mixed_kv:
            self.skipped += 1
            return
        begin = time.perf_counter()
        self.checked += 1
        # Tokens from before a swap are other weights' doing, and their KV was recomputed since.
        since = output.versions[-1].start
        found = rescored(model, output)[since:].cpu().view(torch.int32)
        given = torch.tensor(output.logprobs[since:], dtype=torch.float32).view(torch.int32)
        if not torch.equal(found, given):
            places = [since + place for place in (found != given).nonzero().flatten().tolist()]
            raise BitsDiffer(
                f"sample {output.sample_index} of request {output.request_id!r} was scored again, and {len(places)} of "
                f"{len(output.logprobs)} logprobs have other bits, the first at output token {places[0]}; "
                f"{self._where(model, output, beside)}. The engine stops: please report it"
            )
        self.seconds += time.perf_counter() - begin

    def _where(self, model: Any, output: Output, beside: Sequence[Sample]) -> str:
        """The first op that differs, as far as it can be repeated: first alone, then in company."""
        schedule = PromptThenTokens(len(output.prompt_token_ids), self._block_size)
        company = [each.tokens(0, each.length) for each in beside[:COMPANY]]
        for others in ([], company) if company else ([],):
            if (found := first_difference(model, output.sequence, schedule, others)) is not None:
                return f"the first op that differs is {found}"
        return "repeated by itself, no op differs: it takes the very steps that the engine ran"

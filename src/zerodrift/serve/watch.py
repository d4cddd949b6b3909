"""Is the engine alive, and does it still compute what it computed? Asked while nobody else asks anything.

A canary is a few greedy tokens. Under one set of weights their bits are the same for ever, whatever was served in
between: one that differs makes the server unhealthy, and nothing heals it but a look.
"""

import asyncio
import math
import time
from contextlib import suppress

from zerodrift.core.errors import BitsDiffer, ZerodriftError
from zerodrift.core.request import SamplingParams
from zerodrift.serve.asked import AskedModel, AskedSamples
from zerodrift.serve.bridge import Bridge
from zerodrift.serve.figures import Figures
from zerodrift.stats.kl import k3

LOOK_S = 0.5
CANARY_S = 10.0
"""Idle for so long: a canary."""
HANG_S = 120.0
"""Work to do, no pause, and no step for so long: hung. A step of the longest prefill takes seconds."""
_TOKENS = 4
CanaryBits = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens, and their logprobs."""


class EngineWatch:
    """Looks at one engine."""

    def __init__(self, bridge: Bridge, figures: Figures) -> None:
        self._bridge, self._loop, self._figures = bridge, bridge.engine_loop, figures
        self._steps = -1
        self._stepped = time.monotonic()
        self._seen: dict[str | None, CanaryBits] = {}
        """Bits of the canary, by the digest of the weights."""
        self.differs = False
        self.canary_kl = 0.0
        """Of the last canary."""
        vocabulary = self._loop.engine.facts.vocab_size
        self._prompt = tuple(vocabulary * place // 8 for place in range(1, 5))

    @property
    def age_s(self) -> float:
        """Of the last step; looked for now, since whoever waits for a canary does not."""
        self._look()
        return time.monotonic() - self._stepped

    @property
    def hangs(self) -> bool:
        """It should make steps, and makes none."""
        return bool(self._loop.in_flight) and not self._loop.paused and self.age_s > HANG_S

    @property
    def parity_pass_rate(self) -> float:
        """Of finished samples that were scored again by the trainer's path; the first that differs ends the engine. NaN: none was yet."""
        checked = self._loop.metrics().checked_samples
        return (checked - isinstance(self._loop.error, BitsDiffer)) / checked if checked else math.nan

    @property
    def problem(self) -> str | None:
        """Why it should not be sent requests."""
        if not self._loop.alive or self._loop.error is not None:
            return "the engine has stopped; see the server's log, and start it again"
        if self.differs:
            return "a canary came back with other bits under the same weights; stop, and look at the machine"
        return None

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._look()
            if (
                not self._loop.in_flight
                and not self._loop.paused
                and self.age_s > CANARY_S
                and self.problem is None
            ):
                with suppress(ZerodriftError):
                    await self.canary()
            await asyncio.sleep(LOOK_S)

    async def canary(self) -> None:
        """One."""
        sampling = SamplingParams(temperature=0, max_tokens=_TOKENS, seed=0, ignore_eos=True)
        ask = await self._bridge.submit(
            AskedSamples(
                model=AskedModel("canary", None),
                prompts=(self._prompt,),
                sampling=sampling,
                fills=False,
                wants_logprobs=True,
            ),
            "canary",
        )
        try:
            [output] = await ask.result()
        finally:
            self._bridge.done(ask)
        versions = {span.version.digest for span in output.versions}
        if output.problem is None and len(output.token_ids) == _TOKENS and len(versions) == 1:
            bits = (output.token_ids, output.logprobs)
            first = self._seen.setdefault(versions.pop(), bits)
            same, self.canary_kl = first == bits, kl_between(first, bits)
            self._figures.canaries["same" if same else "differs"] += 1
            self.differs |= not same
        self._look()

    def _look(self) -> None:
        steps = self._loop.metrics().steps
        if steps != self._steps:
            self._steps, self._stepped = steps, time.monotonic()


def kl_between(first: CanaryBits, now: CanaryBits) -> float:
    """Mean k3 of the same tokens' logprobs, in nats; where a greedy token is another one, there is no telling how far it is."""
    if first[0] != now[0]:
        return math.inf
    return float(k3([after - before for before, after in zip(first[1], now[1], strict=True)]).mean())

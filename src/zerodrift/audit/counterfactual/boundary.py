"""Is it the position of a token, or the length of its prompt? Where no output reaches from right to wrong, more is asked.

First prompts of lengths between the longest that is right and the shortest that is off, which brings the two together;
then prompts of the former length whose outputs go on beyond the latter. Tokens there are wrong if their position is what
matters, and right if the prompt's length is. What comes back joins what was there, and all of it is searched anew.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.audit.counterfactual.properties import POSITION, PROMPT, judged, properties_of
from zerodrift.audit.measure import Measurement, tabulate
from zerodrift.audit.observe import BATCH
from zerodrift.audit.prompts import of_lengths
from zerodrift.core.errors import EngineError
from zerodrift.core.request import Request, SamplingParams
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import Gates
from zerodrift.drift.split import ALPHA, Cut, Split, find_split
from zerodrift.stats.arrays import Ids

WORTH_ASKING = 0.2
"""Of a split that is nearly there: more is asked, and the whole must then be no chance."""
LONGER, BETWEEN, CROSSING = 4, 6, 4
SHORT_OUTPUT = 8
BEYOND = 16
"""Tokens of an output that are asked for behind the shortest prompt that is off."""
MOST_ROUNDS = 3
NEAR = 64
"""Tokens between right and wrong prompts that an output can cross at little cost."""
MOST_CROSSED = 512

Ask = Callable[[list[Request]], Sequence[Measurement]]
"""Requests to what the engine answers, scored by the reference."""


class Further(NamedTuple):
    """How an engine is asked for more."""

    ask: Ask
    sampling: SamplingParams
    vocab_size: int
    special: Sequence[int]
    room: int
    """Tokens of prompt and output together."""
    seed: int


class Gathered(NamedTuple):
    """What was measured, with the number of the request of each sequence."""

    measurements: Sequence[Measurement]
    requests: Ids
    in_flight: int = BATCH
    """Requests that were asked together."""

    def joined(self, more: Sequence[Measurement]) -> "Gathered":
        """With what came later."""
        later = self.requests.max() + 1 + np.arange(len(more))
        return Gathered([*self.measurements, *more], np.concatenate([self.requests, later]), self.in_flight)


class Parted(NamedTuple):
    """What parts right from wrong, and why it may not be told better."""

    split: Split
    note: str = ""


def parted_by(
    asked: Gathered, floor: Floor, gates: Gates, rng: np.random.Generator, further: Further | None = None
) -> Parted | None:
    """The split of what was measured; None where there is none that chance would not do."""
    searched = _Search(floor, gates, rng)
    split = searched.of(asked, ALPHA if further is None else WORTH_ASKING, 2 if further is None else 1)
    note = ""
    if split is None:
        return None
    if further is not None and _undecided(split):
        try:
            asked = _nearer(asked, searched, further)
            asked = _crossed(asked, searched, further)
        except EngineError as error:
            note = f"the engine failed while it was asked for more ({error})"
        split = searched.of(asked, ALPHA, 2)
    return Parted(split, note) if split is not None and split.p <= ALPHA else None


class _Search(NamedTuple):
    floor: Floor
    gates: Gates
    rng: np.random.Generator

    def of(self, asked: Gathered, alpha: float, least_prompts: int = 1) -> Split | None:
        table = tabulate(asked.measurements, self.floor)
        return find_split(
            judged(asked.measurements, table, self.gates),
            properties_of(asked.measurements, table, asked.requests, asked.in_flight),
            self.rng,
            alpha,
            least_prompts,
        )


def _undecided(split: Split) -> bool:
    """By length, and not yet known by which; or not yet known whether at all."""
    by_length = {name for name in (PROMPT, POSITION) if name in split.cuts and split.cuts[name].above}
    return bool(by_length) and (len(by_length) > 1 or split.p > ALPHA)


def _by_prompt(split: Split | None) -> Cut | None:
    cut = None if split is None else split.cuts.get(PROMPT)
    return cut if cut is not None and cut.above else None


def _nearer(asked: Gathered, searched: _Search, further: Further) -> Gathered:
    """Prompts between right and wrong, and more that are wrong, until the two are near each other."""
    longest = further.room - SHORT_OUTPUT
    for number in range(MOST_ROUNDS):
        cut = _by_prompt(searched.of(asked, WORTH_ASKING))
        if cut is None or (number and cut.inside - cut.outside <= NEAR):
            break
        between = np.linspace(cut.outside, cut.inside, BETWEEN + 2)[1:-1].astype(int)
        longer = np.linspace(cut.inside, min(longest, 2 * cut.inside), LONGER).astype(int)
        lengths = [*sorted(set(between.tolist())), *(longer.tolist() if number == 0 else [])]
        asked = asked.joined(_ask(further, lengths, SHORT_OUTPUT, number))
    return asked


def _crossed(asked: Gathered, searched: _Search, further: Further) -> Gathered:
    """Prompts that are right, with outputs that reach where prompts are wrong."""
    cut = _by_prompt(searched.of(asked, WORTH_ASKING))
    if cut is None:
        return asked
    lengths = [max(1, int(cut.outside) - less) for less in range(CROSSING)]
    tokens = int(cut.inside) - lengths[-1] + BEYOND
    if tokens > MOST_CROSSED or lengths[0] + tokens > further.room:
        return asked
    return asked.joined(_ask(further, lengths, tokens, MOST_ROUNDS))


def _ask(further: Further, lengths: Sequence[int], tokens: int, number: int) -> Sequence[Measurement]:
    seed = further.seed + 1000 * (number + 1)
    sampling = msgspec.structs.replace(further.sampling, max_tokens=tokens, n=1, ignore_eos=True)
    prompts = of_lengths(further.vocab_size, lengths, further.special, seed)
    return further.ask(
        [
            Request(prompt, msgspec.structs.replace(sampling, seed=seed + place))
            for place, prompt in enumerate(prompts)
        ]
    )

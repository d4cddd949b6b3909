"""Hypotheses about a prefill that is cut into chunks: one may begin a token late or early, or count its positions wrongly.

Which prompts are right tells the size of a chunk: those that fit into one.
"""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from zerodrift.audit.counterfactual.explanation import VANILLA, Explanation, Hypothesis
from zerodrift.audit.counterfactual.path import Paths
from zerodrift.audit.counterfactual.position import FirstOff
from zerodrift.audit.counterfactual.prefill import PrefillReading, reader
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.models.family.rope import rope_bases

MOST_SIZES = 6
"""Sizes of a chunk that are tried: of those possible powers of two first, then multiples of a page."""
PAGE = 16


def late_start(size: int, prompt: int, length: int) -> PrefillReading:
    """Every chunk but the first begins one token late, where another is left: one token is never read."""
    lost = set(range(size, prompt - 1, size))
    places = tuple(place for place in range(length) if place not in lost)
    return PrefillReading(places, places)


def early_start(size: int, prompt: int, length: int) -> PrefillReading:
    """Every chunk but the first begins one token early: one is read twice."""
    twice = {place - 1 for place in range(size, prompt, size)}
    places = tuple(place for place in range(length) for _ in range(1 + (place in twice)))
    return PrefillReading(places, places)


def first_position_early(size: int, prompt: int, length: int) -> PrefillReading:
    """The first token of every chunk but the first has the position of the one before it."""
    firsts = set(range(size, prompt, size))
    return PrefillReading(tuple(range(length)), tuple(place - (place in firsts) for place in range(length)))


def counted_twice(size: int, prompt: int, length: int) -> PrefillReading:
    """From the second chunk on, and in all that is decoded after it, positions are one too high."""
    late = size if prompt > size else length
    return PrefillReading(tuple(range(length)), tuple(place + (place >= late) for place in range(length)))


CHUNK_FAULTS: dict[str, Callable[[int, int, int], PrefillReading]] = {
    "chunks of {} begin one token late, and lose it": late_start,
    "chunks of {} begin one token early, and read it twice": early_start,
    "in chunks of {} the first token has the position before its own": first_position_early,
    "after a first chunk of {} positions are one too high": counted_twice,
}


def sizes_within(begins: FirstOff) -> tuple[int, ...]:
    """Sizes of a chunk, where prompts of so many tokens begin to be off; multiples of a page before others.

    A prompt that is one token longer than a chunk may still be right: nothing is left to lose.
    """
    least, most = max(begins.last_right - 1, 1), begins.first_off - 1
    pages = [size for size in range(-(-least // PAGE) * PAGE, most + 1, PAGE) if size]
    powers = sorted(pages, key=lambda size: (size & (size - 1) != 0, size))
    ends = [size for size in (begins.last_right, most) if size >= PAGE // 2]
    return tuple(dict.fromkeys([*powers[: MOST_SIZES - len(ends)], *ends]))


def chunk_hypotheses(
    explanation: Explanation,
    paths: Paths,
    at_floor: Callable[[Explanation], bool],
    begins: FirstOff | None,
) -> Iterator[Hypothesis]:
    """Chunks that explain what `at_floor` looks at."""
    if explanation.forward != VANILLA or begins is None or not rope_bases(paths.model.config):
        return
    if at_floor(explanation):
        return
    for size in sizes_within(begins):
        for words, read in CHUNK_FAULTS.items():
            message = words.format(size)
            variant = Variant("path/chunked-prefill", message, lambda m: m, alone=reader(partial(read, size)))
            changed = msgspec.structs.replace(explanation, forward=paths.add(message, variant))
            if at_floor(changed):
                yield Hypothesis(variant.cause, message, changed, 2)

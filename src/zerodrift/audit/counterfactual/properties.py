"""What is known of each token and of its request before its number is: a fault may act on some of them alone."""

from collections.abc import Sequence

import numpy as np

from zerodrift.audit.measure import Measurement
from zerodrift.core.request import SCALARS
from zerodrift.drift.gates import Gates
from zerodrift.drift.split import Cut, JudgedTokens, Property, Split, off_tokens
from zerodrift.drift.tokens import TokenTable
from zerodrift.stats.arrays import Ids

PROMPT, POSITION, OUTPUT, CACHED = "prompt", "position", "output", "cached"
ABOVE = {
    PROMPT: "with prompts of {} tokens and more",
    POSITION: "at positions from {} on",
    OUTPUT: "from output token {} on",
    CACHED: "with a hit of the prefix cache",
    "token": "for token ids from {} on",
    "request": "from request {} on",
    "company": "where {} requests and more were in flight",
}
BELOW = {
    PROMPT: "with prompts of up to {} tokens",
    POSITION: "at positions up to {}",
    OUTPUT: "up to output token {}",
    CACHED: "without a hit of the prefix cache",
    "token": "for token ids up to {}",
    "request": "up to request {}",
    "company": "where at most {} requests were in flight",
}
SAMPLING = (*SCALARS, "max_tokens", "n")


def properties_of(
    measurements: Sequence[Measurement], table: TokenTable, requests: Ids, in_flight: int
) -> list[Property]:
    """Of every token; `requests` is the number of the request of each sequence, and so many are asked at a time."""
    answers = [item.observed.completion for item in measurements]
    last = int(requests.max()) // in_flight
    company = np.where(requests // in_flight < last, in_flight, requests.max() % in_flight + 1)
    of_requests = {
        PROMPT: [len(answer.prompt_token_ids) for answer in answers],
        CACHED: [bool(answer.cached_tokens) for answer in answers],
        "request": requests,
        "company": company,
        **{name: [getattr(item.observed.requested, name) for item in measurements] for name in SAMPLING},
    }
    of_tokens = {POSITION: table.position, OUTPUT: table.index, "token": table.token}
    spread = {
        name: np.asarray(values, dtype=np.float64)[table.sequence] for name, values in of_requests.items()
    }
    every = {**spread, **{name: values.astype(np.float64) for name, values in of_tokens.items()}}
    return [Property(name, values) for name, values in every.items()]


def judged(measurements: Sequence[Measurement], table: TokenTable, gates: Gates) -> JudgedTokens:
    """Tokens by how far they are off; sequences of one prompt belong together."""
    known: dict[tuple[int, ...], int] = {}
    prompts = [
        known.setdefault(item.observed.completion.prompt_token_ids, len(known)) for item in measurements
    ]
    size = np.nan_to_num(np.abs(table.delta), posinf=gates.veto, nan=gates.veto)
    return JudgedTokens(size, off_tokens(table, gates), table.sequence, np.array(prompts)[table.sequence])


def edge(cut: Cut) -> str:
    """Between which values the cut lies, as far as was asked, on the side of those that are off."""
    if cut.above:
        low, high = cut.outside + 1, cut.inside
    else:
        low, high = cut.inside, cut.outside - 1
    whole = float(cut.inside).is_integer() and float(cut.outside).is_integer()
    if not whole:
        return f"{cut.inside:g}"
    return f"{low:.0f}" if low >= high else f"{low:.0f}–{high:.0f}"


def where(cut: Cut) -> str:
    """In words."""
    parameter = f"with {cut.name} of {{}} and {'more' if cut.above else 'less'}"
    words = (ABOVE if cut.above else BELOW).get(cut.name, parameter)
    return words.format(edge(cut))


def in_words(split: Split) -> str:
    """Where tokens are off, and how surely no chance."""
    places = " (or: ".join(f"only {where(cut)}" for cut in split.cuts.values()) + ")" * len(split.alike)
    return (
        f"{places}: {split.off_inside} of {split.tokens_inside} tokens are off there and {split.off_outside} of "
        f"{split.tokens_outside} elsewhere, which chance does in less than {split.p:.1g} of tables"
    )

"""An account of what an engine did: the requested behaviour with some things changed.

Each field is one stage on the way from prompt to reported number: the ids the model saw, the forward that computed
logits, the parameters the sampler used, the distribution that was reported, whose entry was read, and how coarsely
all of it was rounded. A hypothesis changes one field; hypotheses on different fields compose because the stages do. The empty account is a healthy
engine.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from zerodrift.core.frozen import freeze

AS_SENT = "as-sent"
VANILLA = "vanilla"
ROUNDED_AS_EXPECTED = "as-expected"


class Reported(StrEnum):
    """Which distribution the reported number was read from."""

    AS_CONTRACTED = "contract"
    """Processed by the parameters that were in force."""
    RAW = "raw"
    """The model's own."""
    AS_REQUESTED = "as-requested"
    """Processed by the requested parameters, whatever was in force: numbers that hide what the sampler did."""
    UNRENORMALISED = "unrenormalised"
    """Processed without truncation: the tokens were drawn from a part of it."""
    OVER_LIKELIEST = "over-likeliest"
    """Processed, and then renormalised over the `top_k` likeliest tokens; what was drawn from is not cut off."""


class Pick(StrEnum):
    """Whose entry of that distribution was read."""

    SAMPLED = "sampled"
    NEXT_ROW = "next-row"
    """The sampled token's entry, one row late."""
    PREVIOUS_ROW = "previous-row"
    PREVIOUS_VALUE = "previous-value"
    """The number that belongs to the token before."""
    NEXT_VALUE = "next-value"
    TOP = "top"
    """The likeliest token's entry."""
    NO_STOP = "no-stop"
    """The sampled token's, but nothing (zero) for a token that ended the output."""
    NO_FIRST = "no-first"
    """The sampled token's, but one and the same number for the first of every output."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What was done at each stage; defaults are what was asked for."""

    context: str = AS_SENT
    """Name of an edit to the prompt ids."""
    forward: str = VANILLA
    """Name of a forward that computed the logits."""
    sampling: Mapping[str, float] = {}
    """Sampling parameters in force that differ from those requested."""
    bias: Mapping[int, float] = {}
    """Logit bias in force beyond the requested one."""
    reported: Reported = Reported.AS_CONTRACTED
    pick: Pick = Pick.SAMPLED
    rounding: str = ROUNDED_AS_EXPECTED
    """Name of a precision whose rounding moved the numbers: it widens what is predicted, and does not shift it."""

    def __post_init__(self) -> None:
        """Accounts share what they do not change."""
        freeze(self, "sampling", "bias")


class Hypothesis(msgspec.Struct, frozen=True):
    """One change to an explanation, and the cause it stands for."""

    cause: str
    message: str
    """The change in words, with fitted values."""
    explanation: Explanation
    """The explanation with the change made."""
    parameters: int = 0
    """Values fitted to the data; each must earn its place."""

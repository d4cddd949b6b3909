"""The token table: every sampled token with what was reported, what the reference makes of it, and how far rounding
may move it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerodrift.stats.arrays import Floats, Ids

RANGES = 32
"""Equal pieces of the vocabulary."""
ENDS = (16, 256)
"""So many first and so many last ids: where tokenizers keep what is not text."""
RARE = tuple(10 ** (-step / 2) for step in range(1, 13))
"""Probabilities in half decades, from 0.3 to a millionth."""
LIKELIEST = 8
RECENT = (1, 4)
"""The last token of an output, and its last four: noise that is used again draws them again."""
COUNTED = 32_768
"""Tokens whose draws are counted, the first of an audit: 9 MB. They see a piece of the vocabulary of 0.08 % of the mass,
and an audit of 2.5 million tokens has to fit into 2 GiB."""

Masses = NDArray[np.float32]


@dataclass(frozen=True)
class DrawMasses:
    """How likely each draw was to fall into some sets, and into which it fell: 271 bytes a token, any vocabulary.

    A draw is taken for two: whether it ends the output, and if not, which other token comes. All but `stop` is about the
    second, so that recordings from which stop tokens were removed can be judged by it.
    """

    ranges: Masses
    """[token, RANGES], in the order of ids."""
    ends: Masses
    """[token, 4]: the first 16 and 256 ids, the last 16 and 256."""
    rarer: Masses
    """[token, RARE]: of all tokens less likely than that."""
    rarity: NDArray[np.uint8]
    """Than how many of RARE the sampled token is less likely."""
    likeliest: NDArray[np.int32]
    """[token, LIKELIEST]: ids of the likeliest, first the likeliest."""
    likeliest_mass: Masses
    stop: Masses
    """Of all stop tokens together."""
    stopped: NDArray[np.bool_]
    """The sampled token is one."""
    recent: Masses
    """[token, RECENT]: of the tokens that were drawn right before it, all together."""
    recurs: NDArray[np.bool_]
    """[token, RECENT]: the sampled token is one of them."""
    vocab_size: int

    def rows(self, chosen: NDArray[np.bool_] | slice) -> "DrawMasses":
        """Some of the tokens."""
        columns = {each.name: getattr(self, each.name) for each in fields(self)}
        size = columns.pop("vocab_size")
        return DrawMasses(**{name: values[chosen] for name, values in columns.items()}, vocab_size=size)

    def put(self, part: slice, other: "DrawMasses") -> None:
        """Those of some tokens, in their place; what lies behind the last is not kept."""
        for each in fields(self):
            if each.name != "vocab_size":
                place = getattr(self, each.name)[part]
                place[:] = getattr(other, each.name)[: len(place)]


def no_masses(tokens: int, vocab_size: int) -> DrawMasses:
    """Room for so many tokens, as far as they are counted."""
    tokens = min(tokens, COUNTED)
    return DrawMasses(
        ranges=np.zeros((tokens, RANGES), np.float32),
        ends=np.zeros((tokens, 2 * len(ENDS)), np.float32),
        rarer=np.zeros((tokens, len(RARE)), np.float32),
        rarity=np.zeros(tokens, np.uint8),
        likeliest=np.zeros((tokens, LIKELIEST), np.int32),
        likeliest_mass=np.zeros((tokens, LIKELIEST), np.float32),
        stop=np.zeros(tokens, np.float32),
        stopped=np.zeros(tokens, np.bool_),
        recent=np.zeros((tokens, len(RECENT)), np.float32),
        recurs=np.zeros((tokens, len(RECENT)), np.bool_),
        vocab_size=vocab_size,
    )


def joined(parts: Sequence[DrawMasses]) -> DrawMasses:
    """Those of several sequences, one after the other."""
    names = [each.name for each in fields(DrawMasses) if each.name != "vocab_size"]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return DrawMasses(**columns, vocab_size=parts[0].vocab_size)


@dataclass(frozen=True)
class TokenTable:
    """All tokens of all sequences, as columns."""

    sequence: Ids
    index: Ids
    """Within the output."""
    position: Ids
    """Within prompt and output."""
    token: Ids
    reported: Floats
    contracted: Floats
    """Reference logprob under the requested parameters; −inf where those exclude the token."""
    raw: Floats
    entropy: Floats
    variance: Floats
    by_likelihood: Floats
    by_id: Floats
    sigma: Floats
    masses: DrawMasses
    """Of the first tokens; the others are not counted."""
    ends_told: bool
    """Whether every output that is shorter than asked for ends in a stop token: else some were left out."""

    @property
    def delta(self) -> Floats:
        """log π_trainer − log π_rollout."""
        result: Floats = self.contracted - self.reported
        return result

    @property
    def columns(self) -> dict[str, Any]:
        """One number per token each: what `tokens.parquet` keeps."""
        return {name: values for name, values in vars(self).items() if name not in ("masses", "ends_told")}

    @property
    def counted(self) -> "TokenTable":
        """The tokens that have masses."""
        return self.rows(np.arange(len(self.token)) < len(self.masses.stop))

    def rows(self, chosen: NDArray[np.bool_]) -> "TokenTable":
        """Some of the tokens."""
        columns = {name: values[chosen] for name, values in self.columns.items()}
        masses = self.masses.rows(chosen[: len(self.masses.stop)])
        return TokenTable(**columns, masses=masses, ends_told=self.ends_told)

"""Token sequences whose logprobs tell whether an update arrived. Torch-free.

Any text that the model knows will do, and the rollouts of the last step do best: what an update moves is where it trained.
Many short sequences say more than few long ones, since a sequence is one witness: some 25 are the fewest that decide anything.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import takewhile

import msgspec
import numpy as np

from zerodrift.core import require
from zerodrift.core.completion import Completion
from zerodrift.core.errors import InvalidPrompt, InvalidValue
from zerodrift.stats.arrays import Floats, Ids, finite

LENGTH = 9
"""Of a random sequence: 8 tokens that are scored, behind one that is not."""


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same sequences before every update and after it."""

    sequences: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """At least two, of at least two tokens."""
        for ids in require.a_tuple(InvalidPrompt, "canary sequences", self.sequences):
            require.token_ids(InvalidPrompt, "a canary sequence", ids)
        if len(self.sequences) < 2 or min(map(len, self.sequences)) < 2:
            raise InvalidPrompt("a canary needs two sequences of two tokens: the first token is never scored")
        if twice := len(self.sequences) - len({*self.sequences}):
            raise InvalidPrompt(
                f"{twice} of {len(self.sequences)} canary sequences stand there already: what errs alike is one witness, and "
                "counted as several raises false alarms; give each once"
            )

    @property
    def digest(self) -> str:
        """sha256 over all of it."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def tokens(self) -> int:
        """That are scored."""
        return sum(len(ids) - 1 for ids in self.sequences)

    @property
    def sequence(self) -> Ids:
        """Of each scored token, the number of its sequence."""
        return np.repeat(np.arange(len(self.sequences)), [len(ids) - 1 for ids in self.sequences])

    def first(self, sequences: int) -> "Canary":
        """The first so many."""
        return Canary(self.sequences[:sequences])

    def flat(self, name: str, scores: Sequence[Sequence[float]]) -> Floats:
        """Scores by sequence as one array, one for each scored token."""
        lengths = [len(row) for row in scores]
        if lengths != [len(ids) - 1 for ids in self.sequences]:
            raise InvalidValue(
                f"{name} scored {sum(lengths)} tokens of {len(lengths)} canaries; there are {self.tokens}"
            )
        return finite(name, [value for row in scores for value in row])


def canary_of(completions: Iterable[Completion], longest: int = 64) -> Canary:
    """Of rollouts, one of each prompt and without what all prompts begin with, each cut where it is long.

    Eight samples of each of 20 prompts, all behind one template, would be counted as 160 witnesses where 20 are.
    """
    one_each = {each.prompt_token_ids: each.sequence for each in reversed([*completions])}
    alike = takewhile(lambda at: len({*at}) == 1, zip(*one_each, strict=False))
    shared = sum(1 for _ in alike)
    return Canary(tuple(sequence[shared:][:longest] for sequence in reversed(one_each.values())))


def random_canary(vocab_size: int, tokens: int, seed: int = 0, avoid: Iterable[int] = ()) -> Canary:
    """`tokens` or a few more, drawn at random: for a model that nothing is known of."""
    allowed = np.setdiff1d(np.arange(vocab_size), np.fromiter(avoid, dtype=np.int64))
    rng = np.random.default_rng(seed)
    rows = rng.choice(allowed, size=(-(-tokens // (LENGTH - 1)), LENGTH))
    return Canary(tuple(tuple(row) for row in rows.tolist()))

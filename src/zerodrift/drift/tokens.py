"""The token table: every sampled token with what was reported, what the reference makes of it, and how far rounding
may move it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerodrift.stats.arrays import Floats, Ids


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

    @property
    def delta(self) -> Floats:
        """log π_trainer − log π_rollout."""
        result: Floats = self.contracted - self.reported
        return result

    def rows(self, chosen: NDArray[np.bool_]) -> "TokenTable":
        """Some of the tokens."""
        return TokenTable(**{name: values[chosen] for name, values in vars(self).items()})

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from zerodrift.drift.tokens import DrawMasses, TokenTable, no_masses
from zerodrift.stats.arrays import Floats

Table = Callable[..., TokenTable]


def certain_ends(tokens: int) -> DrawMasses:
    """Of tokens that each had to end an output: no count of them says anything."""
    masses = no_masses(tokens, 512)
    masses.stop[:], masses.stopped[:] = 1.0, True
    return masses


@pytest.fixture(scope="session")
def table() -> Table:
    """Tokens that are off by these Δ, given for each sequence or dealt over some, and drawn as they claim to be."""

    def made(
        deltas: Floats | Sequence[Floats], contracted: Floats | None = None, sequences: int = 20
    ) -> TokenTable:
        parts = np.array_split(deltas, sequences) if isinstance(deltas, np.ndarray) else deltas
        lengths, delta = [len(part) for part in parts], np.concatenate(parts)
        wanted = np.full(len(delta), -1.0) if contracted is None else contracted
        index = np.concatenate([np.arange(length) for length in lengths])
        return TokenTable(
            sequence=np.repeat(np.arange(len(lengths)), lengths),
            index=index,
            position=index + 5,
            token=np.zeros(len(delta), dtype=np.int64),
            reported=np.where(np.isfinite(wanted), wanted, -1.0) - delta,
            contracted=wanted,
            raw=wanted,
            entropy=np.full(len(delta), 1.0),
            variance=np.ones(len(delta)),
            by_likelihood=np.random.default_rng(1).random(len(delta)),
            by_id=np.random.default_rng(2).random(len(delta)),
            sigma=np.full(len(delta), 1e-3),
            masses=certain_ends(len(delta)),
            ends_told=True,
        )

    return made

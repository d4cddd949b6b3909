"""Where randomness comes from: one uniform number per (seed, sample index, position), and nothing else.

No request id, no batch index, no generator that remembers how often it was asked: a token drawn alone, in a crowd
or after a preemption sees the same number. The mixing function is the finaliser of splitmix64 (Steele, Lea and
Flood 2014), applied once per coordinate.
"""

import secrets

from zerodrift.core.request import MAX_SEED

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. fp32 noise would never reach tokens rarer than 2⁻²⁴."""
    state = seed & _MASK
    for coordinate in (sample_index, position):
        state = _mix(state + _GOLDEN * (coordinate + 1) & _MASK)
    return (state >> 11) * 2.0**-53


def draw_seed() -> int:
    """A seed for a request that came without one; it is reported with the completion."""
    return secrets.randbelow(MAX_SEED + 1)


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31

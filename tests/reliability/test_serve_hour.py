"""Would a leak have been seen in the hour of mixed load? What `serve_hour.py` says of memory, seen failing."""

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from serve_hour import LOOK_S, Looked, slope_of

NOISE_MIB = 8.0
"""From one look to the next, as in the hour of docs/serve.md."""


def looks(minutes, mib_per_hour, seed):
    draw = random.Random(seed)
    times = [LOOK_S * number for number in range(round(60 * minutes / LOOK_S))]
    return [
        Looked(at, 1285 + mib_per_hour * at / 3600 + draw.gauss(0, NOISE_MIB), files=17, threads=8)
        for at in times
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("minutes", "mib_per_hour", "says"),
    [
        (60, 0, None),
        (60, 45, "memory grows"),
        (60, 300, "memory grows"),
        (3, 0, ""),
        (3, 45, ""),
    ],
)
def test_flat_is_what_could_not_hide_a_leak(minutes, mib_per_hour, says, seed):
    """45 MiB an hour are 21 KiB for each of its requests, or a sixtieth of the weights for each update. A short run is never flat."""
    problem = slope_of(looks(minutes, mib_per_hour, seed)).problem
    assert (problem is None) if says is None else (problem is not None and says in problem)

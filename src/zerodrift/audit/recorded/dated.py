"""Since when, once the cause has a name? Then every rollout says by itself whether it has the fault.

Bets on step means need many steps (`drift/onset.py`), because they may assume nothing about the fault. Where each
rollout of the later steps fits it, and each of the earlier ones is the checkpoint's, there is nothing left to bet on.
"""

from collections.abc import Sequence
from math import lgamma, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerodrift.drift.onset import ALPHA
from zerodrift.drift.strata import Timeline

LEAST = 2
"""Rollouts that must show the fault: one may be a stray."""
MOSTLY = 0.9
"""Share of those before it that must be sound, to say when it began."""


class Dated(NamedTuple):
    """When a named fault began, by the rollouts that have it."""

    first: int
    """Number of the step, or of the line."""
    affected: int
    """Steps that hold some."""
    message: str


def parted(order: Timeline, faulty: NDArray[np.bool_], sound: NDArray[np.bool_]) -> bool:
    """Steps in a row hold all that are faulty and none that is sound, and chance would not have put them so."""
    count = int(faulty.sum())
    if not count or not (faulty | sound).all():
        return False
    places = order.of_sequence[faulty]
    if sound[(order.of_sequence >= places.min()) & (order.of_sequence <= places.max())].any():
        return False
    ways = lgamma(len(faulty) + 1) - lgamma(count + 1) - lgamma(len(faulty) - count + 1)
    rows_of_steps = len(order.labels) * (len(order.labels) + 1) / 2
    return log(rows_of_steps) - ways < log(ALPHA)


def by_line(order: Timeline, lines: Sequence[int], faulty: NDArray[np.bool_]) -> Timeline:
    """The same order with a place for every line, where nearly all from the first that is faulty to the last are: a block
    of lines begins where it begins, and the fault need not."""
    places = np.flatnonzero(faulty)
    if order.unit == "step" or not len(places):
        return order
    between = faulty[places[0] : places[-1] + 1]
    return Timeline(order.unit, tuple(lines), np.arange(len(lines))) if between.mean() >= MOSTLY else order


def dated(order: Timeline, faulty: NDArray[np.bool_], sound: NDArray[np.bool_], message: str) -> Dated | None:
    """The first step with the fault; None where rollouts before it are neither faulty nor sound."""
    if faulty.sum() < LEAST:
        return None
    place, known = order.of_sequence, faulty | sound
    places = np.unique(place[faulty])
    first, last = int(places[0]), int(places[-1])
    before = place < first
    right = int((before & sound).sum())
    if right < MOSTLY * before.sum():
        return None
    label, unit = order.labels[first], order.unit
    within = known & (place >= first) & (place <= last)
    counted = f"{int(faulty.sum())} of {int(within.sum())} rollouts {message}"
    if first == 0:
        when = f"bad from the first recorded {unit} ({label}) on"
    else:
        when = f"since {unit} {label}"
        counted += f", and {right} of {int(before.sum())} before it are the checkpoint's"
    if last < len(order.labels) - 1:
        when += f", last seen in {unit} {order.labels[last]}"
    return Dated(label, len(places), f"{when}: {counted}")

"""Tokens by what they have in common: rounding grows with rarity, a cache fault with position, a bad night with steps."""

from typing import NamedTuple

import numpy as np

from zerodrift.stats.arrays import Floats, Ids


class Timeline(NamedTuple):
    """Steps in ascending order, and the place in it of every sequence."""

    unit: str
    """`step`, or `line` where the dump has no steps and blocks of lines stand in for them."""
    labels: tuple[int, ...]
    """Number of each step, or first line of each block."""
    of_sequence: Ids


def equal_groups(values: Floats, most: int) -> list[Ids]:
    """Indices by ascending value, in at most so many groups of nearly equal size: of log p, from rare to certain."""
    order: Ids = np.argsort(values)
    return [np.asarray(group) for group in np.array_split(order, min(most, len(order)))]


def group_means(values: Floats, group: Ids, groups: int) -> Floats:
    """Mean of each group; 0 where it is empty."""
    sums = np.bincount(group, weights=values, minlength=groups)
    means: Floats = sums / np.maximum(np.bincount(group, minlength=groups), 1)
    return means

"""What can be wrong by a little, by name: one number of a lever, or several that an engine turns together.

The derivative by a knob is the weighted sum of those by its members, so a scale that is off in every layer costs no
forward of its own. Torch-free.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from zerodrift.audit.response.levers import Columns, Effect, Jacobian, Lever, Member
from zerodrift.stats.arrays import Floats


class Knob(NamedTuple):
    """A quantity, and what moves with it."""

    layer: int | None
    part: str
    number: int | None
    """Of several of a kind."""
    quantity: str
    kind: Effect
    members: tuple[tuple[Member, float], ...]
    """Numbers of levers, and how far each goes where the knob goes by 1."""
    neutral: float = 1.0
    """The value of the quantity where nothing is wrong."""
    channels: tuple[int, int] | None = None
    """The first and the one behind the last, where it is about a run of channels."""

    @property
    def place(self) -> str:
        """In words."""
        layer = "" if self.layer is None else f"layer {self.layer}, "
        number = "" if self.number is None else f" {self.number}"
        return f"{layer}{self.part}{number}{channels_in_words(self.channels)}"

    def value(self, t: float) -> float:
        """The quantity where the knob was moved by `t`."""
        if self.quantity == "base":
            return math.exp(t)
        if self.kind in (Effect.SOFT_CAP, Effect.SCORE_CAP):
            return 1 / math.sqrt(max(t, 1e-12))
        return self.neutral + t

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which it is a fault that somebody could have made: nobody multiplies a neuron by −300."""
        low, high = _BOUNDS.get(self.kind, (-2.0, 2.0))
        return (-self.neutral if self.kind is Effect.NORM_EPS else low), high

    def settings(self, t: float) -> dict[Member, float]:
        """What the levers stand at."""
        return {member: weight * t for member, weight in self.members}


_BOUNDS = {
    Effect.KEYS_FP8: (0.5, 1.5),
    Effect.VALUES_FP8: (0.5, 1.5),
    Effect.NORM_EPS: (0.0, 1.0),
    Effect.SOFT_CAP: (0.0, 1.0),
    Effect.SCORE_CAP: (0.0, 25.0),
    # A score of −7 to 7.
    Effect.SINK: (1e-3, 1e3),
    Effect.HEAD_POSITION: (-8.0, 8.0),
    Effect.LOGIT_ROW: (-20.0, 20.0),
    # Of numbers of the size of 1.
    Effect.QUERY_OFFSET: (-5.0, 5.0),
    Effect.KEY_OFFSET: (-5.0, 5.0),
    Effect.VALUE_OFFSET: (-5.0, 5.0),
    # The other sign is 2 away.
    Effect.QUERY_CHANNEL: (-3.0, 2.0),
    Effect.KEY_CHANNEL: (-3.0, 2.0),
    Effect.VALUE_CHANNEL: (-3.0, 2.0),
    Effect.EMBEDDED_BIAS: (-5.0, 5.0),
    Effect.ATTENTION_BIAS: (-5.0, 5.0),
    Effect.MLP_BIAS: (-5.0, 5.0),
    # Divided by, or undone by the norm behind it: neither is anything at 0.
    Effect.SLOPE: (-0.9, 2.0),
    Effect.RESIDUAL: (-0.9, 2.0),
}
_IN_WORDS = {
    Effect.SCORES: ("attention", "scale of scores"),
    Effect.HEAD: ("attention", "output"),
    Effect.KEYS_FP8: ("keys", "fp8"),
    Effect.VALUES_FP8: ("values", "fp8"),
    Effect.NORM_GAIN: ("norm", "gain"),
    Effect.NORM_EPS: ("norm", "eps"),
    Effect.NEURON: ("MLP", "output"),
    Effect.SLOPE: ("activation", "slope"),
    Effect.GATE: ("gate", "output"),
    Effect.RESIDUAL: ("residual stream into it", "scale"),
    Effect.EXPERT: ("experts", "output"),
    Effect.ROTARY: ("rotary", "frequencies"),
    Effect.QUERY_OFFSET: ("queries", "offset"),
    Effect.KEY_OFFSET: ("keys", "offset"),
    Effect.VALUE_OFFSET: ("values", "offset"),
    Effect.QUERY_CHANNEL: ("queries", "scale"),
    Effect.KEY_CHANNEL: ("keys", "scale"),
    Effect.VALUE_CHANNEL: ("values", "scale"),
    Effect.EMBEDDED_BIAS: ("residual stream into it", "bias"),
    Effect.ATTENTION_BIAS: ("output of attention", "bias"),
    Effect.MLP_BIAS: ("output of the MLP", "bias"),
    Effect.SINK: ("attention", "sink"),
    Effect.SCORE_CAP: ("attention scores", "soft cap"),
    Effect.HEAD_POSITION: ("positions of queries", "offset"),
    Effect.OFFSET: ("positions of the output", "offset"),
    Effect.LOGIT_SCALE: ("logits", "scale"),
    Effect.SOFT_CAP: ("logits", "soft cap"),
    Effect.LOGIT_ROW: ("logit of token", "bias"),
}
_SINGLE = {
    Effect.SCORES: "attention head",
    Effect.HEAD: "attention head",
    Effect.NEURON: "MLP neuron",
    Effect.EXPERT: "expert",
    Effect.ROTARY: "rotary band",
    Effect.LOGIT_ROW: "logit of token",
    Effect.QUERY_OFFSET: "queries of head",
    Effect.KEY_OFFSET: "keys of KV head",
    Effect.VALUE_OFFSET: "values of KV head",
    Effect.QUERY_CHANNEL: "queries of head",
    Effect.KEY_CHANNEL: "keys of KV head",
    Effect.VALUE_CHANNEL: "values of KV head",
    Effect.SINK: "attention head",
    Effect.HEAD_POSITION: "queries of head",
}
_ADDED = (
    *(Effect.QUERY_OFFSET, Effect.KEY_OFFSET, Effect.VALUE_OFFSET, Effect.SINK, Effect.HEAD_POSITION),
    *(Effect.EMBEDDED_BIAS, Effect.ATTENTION_BIAS, Effect.MLP_BIAS),
)
"""What is not there where nothing is wrong."""

_OF_LAYERS = (
    Effect.SCORES,
    Effect.HEAD,
    Effect.KEYS_FP8,
    Effect.VALUES_FP8,
    Effect.NEURON,
    Effect.SLOPE,
    Effect.GATE,
    Effect.EXPERT,
    *(Effect.QUERY_OFFSET, Effect.KEY_OFFSET, Effect.VALUE_OFFSET),
    *(Effect.SINK, Effect.SCORE_CAP, Effect.HEAD_POSITION),
)
"""What may be one setting of all layers; a residual stream that is scaled before each is no setting of anything."""


def knobs_of(levers: Sequence[Lever]) -> list[Knob]:
    """The widest first: of two that no data can tell apart, the first is named and the other mentioned."""
    # A scale of scores is that of head norms too, and is the commoner fault: norms come last among equals.
    order = sorted(levers, key=lambda lever: lever.kind in (Effect.NORM_GAIN, Effect.NORM_EPS))
    return [*_everywhere(order), *_whole(order), *_single(order)]


def by_knob(knobs: Sequence[Knob], jacobian: Jacobian) -> Floats:
    """Derivatives by knobs, side by side."""
    columns, matrix_NC = jacobian
    matrix_NK = np.empty((len(matrix_NC), len(knobs)), dtype=matrix_NC.dtype)
    for number, knob in enumerate(knobs):
        places, weights = _places(knob, columns)
        matrix_NK[:, number] = matrix_NC[:, places] @ weights
    return matrix_NK


def _places(knob: Knob, columns: Columns) -> tuple[list[int], Floats]:
    weights = np.array([weight for _, weight in knob.members])
    return [columns[member] for member, _ in knob.members], weights


def _everywhere(levers: Sequence[Lever]) -> Iterator[Knob]:
    """A quantity that is one setting of the model: the same in all layers, or in all norms of one name."""
    in_layers = [lever for lever in levers if lever.layer is not None]
    for kind in _OF_LAYERS:
        chosen = [lever for lever in in_layers if lever.kind is kind]
        if len(chosen) > 1:
            part, quantity = _IN_WORDS[kind]
            yield _together(chosen, None, f"{part} in all layers", quantity)
    stored = [lever for lever in in_layers if lever.kind in (Effect.KEYS_FP8, Effect.VALUES_FP8)]
    if stored:
        yield _together(stored, None, "keys and values in all layers", "fp8")
    for kind in (Effect.NORM_EPS, Effect.NORM_GAIN):
        norms = [lever for lever in levers if lever.kind is kind]
        yield from _norms(norms, _IN_WORDS[kind][1])


def _norms(norms: Sequence[Lever], quantity: str) -> Iterator[Knob]:
    outer = [lever for lever in norms if not lever.of_heads]
    groups = {"all norms": list(norms), "all norms but those of heads": outer}
    for place, same in groupby(sorted(norms, key=lambda lever: lever.place), key=lambda lever: lever.place):
        groups[f"{place} in all layers"] = list(same)
    seen = set[tuple[Lever, ...]]()
    for part, chosen in groups.items():
        same_ones = tuple(sorted(chosen, key=str))
        if len(chosen) > 1 and same_ones not in seen:
            seen.add(same_ones)
            yield _together(chosen, None, part, quantity)


def _whole(levers: Sequence[Lever]) -> Iterator[Knob]:
    """All numbers of one lever together."""
    for lever in levers:
        part, quantity = _IN_WORDS[lever.kind]
        if lever.kind is Effect.LOGIT_ROW or lever.block:
            continue
        if lever.kind is Effect.ROTARY:
            # ω = base^(−i/n): a base that is e^t times as large slows a frequency down by t · i/n.
            slower = [-(index + 0.5) / lever.size for index in range(lever.size)]
            members = tuple(((lever, index), weight) for index, weight in enumerate(slower))
            yield Knob(None, _table(lever), None, "base", lever.kind, members)
        named = lever.place or part
        named = _table(lever) if lever.kind is Effect.ROTARY else named
        named = part if lever.kind is Effect.OFFSET else named
        yield _together([lever], lever.layer, named, quantity)


def _single(levers: Sequence[Lever]) -> Iterator[Knob]:
    """Every number by itself."""
    for lever in levers:
        if lever.kind not in _SINGLE or lever.size == 1 or lever.block:
            continue
        _, quantity = _IN_WORDS[lever.kind]
        neutral = 0.0 if lever.kind in (Effect.LOGIT_ROW, *_ADDED) else 1.0
        for index in range(lever.size):
            label = lever.labels[index] if lever.labels else index
            member = (((lever, index), 1.0),)
            yield Knob(lever.layer, _SINGLE[lever.kind], label, quantity, lever.kind, member, neutral)


def run(lever: Lever, first: int, last: int) -> Knob:
    """Some channels of a lever, all alike."""
    part, quantity = _IN_WORDS[lever.kind]
    head = None if lever.block == lever.size else first // lever.block
    begin = 0 if head is None else head * lever.block
    members = tuple(((lever, index), 1.0) for index in range(first, last))
    whole = last - first == lever.block
    return Knob(
        lever.layer,
        part if head is None else _SINGLE[lever.kind],
        head,
        quantity,
        lever.kind,
        members,
        0.0 if lever.kind in _ADDED else 1.0,
        None if whole else (first - begin, last - begin),
    )


def channels_in_words(channels: tuple[int, int] | None) -> str:
    """The last one is among them."""
    if channels is None:
        return ""
    first, last = channels
    return f", channel {first}" if last == first + 1 else f", channels {first}–{last - 1}"


def _together(levers: Iterable[Lever], layer: int | None, part: str, quantity: str) -> Knob:
    levers = list(levers)
    members = tuple(((lever, index), 1.0) for lever in levers for index in range(lever.size))
    kind = levers[0].kind
    neutral = {Effect.NORM_EPS: levers[0].neutral}.get(kind, 1.0)
    if kind in (Effect.KEYS_FP8, Effect.VALUES_FP8, Effect.OFFSET, *_ADDED):
        neutral = 0.0
    return Knob(layer, part, None, quantity, kind, members, neutral)


def _table(lever: Lever) -> str:
    kind = lever.place.removesuffix("inv_freq").rstrip("_").replace("_", " ")
    return f"rotary table of {kind}" if kind else "rotary table"

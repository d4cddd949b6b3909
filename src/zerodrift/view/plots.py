"""What does Δ look like? Its distribution, and |Δ| against position, against log p and per sequence.

Tokens that the request excludes have Δ = −∞ and no place in any figure: the page counts them. Lines are means over
all tokens. Points are the largest, because a fault that hits one token in ten thousand is what a reader looks for, and a
random sample of the rest, because the crowd must look like the crowd. The distribution has bins of equal width in
log |Δ|, ten to the decade, to both sides of one in the middle that holds everything below the smallest decade of
interest: Δ sits at ±(½ + 10 log10(|Δ| / least)).
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zerodrift.records.verdict import VerdictRecord
from zerodrift.view.figure import INK, Floats, Mark, Trace, axis, cloud, figure, line, marks, short, size_axis
from zerodrift.view.notation import count, number
from zerodrift.view.run_directory import Tokens

CROWDS = 40
"""Parts of equal size, along the axis, in which the mean of |Δ| is drawn as a line."""
MOST_POINTS = 2000
"""Of one trace: SVG stays fluid on a phone up to about 5,000 nodes a plot."""
KEPT_LARGEST = 200
BINS_PER_DECADE = 10
LOWEST_DECADE = -9
"""Below a nano-nat even fp64 sums differ by their order."""


class Bins(NamedTuple):
    """Tokens along the signed logarithmic axis."""

    lowest_decade: int
    """|Δ| below 10 to this power is in the middle bin."""
    centres: list[int]
    counts: list[int]

    @property
    def least(self) -> float:
        """|Δ| below this is in the middle bin."""
        return float(10.0**self.lowest_decade)

    @property
    def reach(self) -> int:
        """How far from the middle the outermost tokens are, in bins."""
        return max(abs(centre) for centre, held in zip(self.centres, self.counts, strict=True) if held)

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """Δ from and to, for every bin."""
        found = []
        for centre in self.centres:
            low, high = self._edge(abs(centre) - 1), self._edge(abs(centre))
            found.append((low, high) if centre > 0 else (-high, -low) if centre else (-high, high))
        return found

    def place(self, delta: float) -> float:
        """Where `delta` sits on the axis; everything below `least` sits in the middle."""
        if abs(delta) < self.least:
            return 0.0
        return float(np.sign(delta) * (0.5 + (np.log10(abs(delta)) - self.lowest_decade) * BINS_PER_DECADE))

    def _edge(self, steps: int) -> float:
        return float(10.0 ** (self.lowest_decade + steps / BINS_PER_DECADE))


class Plot(NamedTuple):
    """A figure with what a reader should take from it."""

    key: str
    title: str
    message: str
    figure: dict[str, Any]


def plots(tokens: Tokens, record: VerdictRecord) -> tuple[Plot, ...]:
    """Every figure that these tokens can fill; where all are equal to the last bit, that is the first alone."""
    possible = tokens.possible
    if not possible.any():
        return ()
    kept = tokens.take(np.flatnonzero(possible))
    lines = marks(record.floor.get("mean"), record.gates.get("mean"))
    first = _distribution(kept, lines)
    if not kept.delta.any():
        return (first,)
    return first, _by_position(kept, lines), _by_logprob(kept, lines), _by_sequence(kept, lines)


def _distribution(tokens: Tokens, lines: list[Mark]) -> Plot:
    bins = signed_log_bins(tokens.delta)
    top = 2.0 * max(bins.counts)
    bars: Trace = {
        "type": "bar",
        "name": "tokens",
        "x": bins.centres,
        "y": [held or None for held in bins.counts],
        "width": 1,
        "marker": {"color": "var(--data)", "line": {"width": 0}},
        "customdata": [[number(low), number(high)] for low, high in bins.ranges],
        "hovertemplate": "%{y:,} tokens with Δ from %{customdata[0]} to %{customdata[1]}<extra></extra>",
        "showlegend": False,
    }
    traces = [bars]
    for mark in lines:
        place = bins.place(mark.value)
        x = [-place, -place, None, place, place]
        traces.append(line(f"± {mark.name} {number(mark.value)}", x, [0.5, top, None, 0.5, top], mark.line))
    zeros = int((tokens.delta == 0).sum())
    message = (
        "To the right of the middle the engine reports less than the reference computes, to the left more. The "
        f"middle bar holds |Δ| below {number(bins.least)}. {count(zeros)} of {count(tokens.delta.size)} tokens are "
        "equal to the last bit."
    )
    x_axis = axis("Δ in nats, logarithmic to both sides", **_ticks(bins, lines))
    # One token must still be a bar, so the axis begins below 1.
    y_axis = axis("tokens", type="log", dtick=1, range=[float(np.log10(0.7)), float(np.log10(top))])
    return Plot("distribution", "How Δ is distributed", message, figure(traces, x_axis, y_axis))


def _ticks(bins: Bins, lines: list[Mark]) -> dict[str, Any]:
    """Powers of ten to both sides of 0, four to a side at most: nine labels fill a phone's width."""
    edge = max(bins.reach, *(bins.place(mark.value) for mark in lines), BINS_PER_DECADE) + 2.0
    decades = range(bins.lowest_decade + 1, bins.lowest_decade + int(edge) // BINS_PER_DECADE + 1)
    step = -(-len(decades) // 4)
    decades = decades[step - 1 :: step]
    places = [bins.place(10.0**decade) for decade in decades]
    labels = [f"10<sup>{decade}</sup>" for decade in decades]
    return {
        "tickvals": [*(-place for place in reversed(places)), 0, *places],
        "ticktext": [*(f"−{label}" for label in reversed(labels)), "0", *labels],
        "tickangle": 0,
        "range": [-edge, edge],
    }


def _by_position(tokens: Tokens, lines: list[Mark]) -> Plot:
    message = (
        "Growth along the sequence points at rotary positions, the KV cache or the length of the context."
    )
    along = tokens.position.astype(np.float64), "position in prompt and output", "position %{x}"
    shown, drawn = _scatter(*along, tokens, lines)
    return Plot("position", "|Δ| against position", f"{message} {drawn}", shown)


def _by_logprob(tokens: Tokens, lines: list[Mark]) -> Plot:
    message = (
        "A slope points at temperature or raw logprobs, a constant at truncation; rounding rises to the left."
    )
    shown, drawn = _scatter(tokens.contracted, "log p under the reference", "log p %{x}", tokens, lines)
    return Plot("logprob", "|Δ| against log p", f"{message} {drawn}", shown)


def _scatter(
    values: Floats, title: str, hover: str, tokens: Tokens, lines: list[Mark]
) -> tuple[dict[str, Any], str]:
    """Single tokens by the sign of Δ, the mean of |Δ| along the axis, and floor and gate across."""
    delta, sizes = tokens.delta, np.abs(tokens.delta)
    chosen = choose_points(sizes)
    hover = f"|Δ| %{{y}} at {hover}<br>sequence %{{customdata[0]}}, token id %{{customdata[1]}}"
    traces = []
    for name, colour, side in (
        ("engine reports less", "var(--less)", delta > 0),
        ("engine reports more", "var(--more)", delta < 0),
    ):
        rows = chosen[side[chosen]]
        trace = cloud(name, values[rows], sizes[rows], colour, hover)
        trace["customdata"] = np.stack((tokens.sequence[rows], tokens.token[rows]), axis=1).tolist()
        traces.append(trace)
    traces.append(line("mean |Δ|", *_crowds(values, sizes), INK))
    traces += _across(values, lines)
    message = _drawn(chosen.size, sizes.size, "tokens", int((delta[chosen] == 0).sum()))
    return figure(traces, axis(title), size_axis()), message


def _drawn(drawn: int, total: int, what: str, zeros: int) -> str:
    """Which points there are, and which of them a logarithmic axis cannot show."""
    message = f"All {total:,} {what} are drawn."
    if drawn < total:
        others = f"{drawn - KEPT_LARGEST:,} of the others at random (seed 0)"
        message = f"Drawn: the {KEPT_LARGEST} largest of {total:,} {what} and {others}."
    hidden = f" {count(zeros)} of these are exactly 0 and have no place on this axis."
    return message + (hidden if zeros else "")


def _by_sequence(tokens: Tokens, lines: list[Mark]) -> Plot:
    sequences, where = np.unique(tokens.sequence, return_inverse=True)
    sizes = np.abs(tokens.delta)
    means = np.bincount(where, weights=sizes) / np.bincount(where)
    largest = np.zeros(sequences.size)
    np.maximum.at(largest, where, sizes)
    chosen = choose_points(means)
    shown = chosen[means[chosen] > 0]
    traces = [
        cloud(name, sequences[shown], values[shown], colour, f"sequence %{{x}}: {name} %{{y}}")
        for name, values, colour in (
            ("largest |Δ|", largest, "var(--more)"),
            ("mean |Δ|", means, "var(--less)"),
        )
    ]
    traces += _across(sequences.astype(np.float64), lines)
    message = (
        "A few sequences far above the rest point at a replica, a cache hit or a misbound request. "
        f"{_drawn(chosen.size, means.size, 'sequences', chosen.size - shown.size)}"
    )
    return Plot("sequence", "|Δ| per sequence", message, figure(traces, axis("sequence"), size_axis()))


def _across(values: npt.NDArray[np.float64], lines: list[Mark]) -> list[Trace]:
    ends = [float(values.min()), float(values.max())]
    return [line(f"{mark.name} {number(mark.value)}", ends, [mark.value] * 2, mark.line) for mark in lines]


def _crowds(values: Floats, sizes: Floats) -> tuple[list[float], list[float | None]]:
    """Mean place and mean |Δ| in up to CROWDS parts of equal size."""
    parts = np.array_split(np.argsort(values, kind="stable"), min(CROWDS, values.size))
    places = short(values[part].mean() for part in parts)
    return places, [mean or None for mean in short(sizes[part].mean() for part in parts)]


def choose_points(sizes: npt.NDArray[np.float64], most: int = MOST_POINTS) -> npt.NDArray[np.int64]:
    """Indices into `sizes`, ascending: all of them, or the largest and a sample of the rest."""
    if sizes.size <= most:
        return np.arange(sizes.size, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    drawn = np.random.default_rng(0).choice(order[KEPT_LARGEST:], most - KEPT_LARGEST, replace=False)
    return np.sort(np.concatenate((order[:KEPT_LARGEST], drawn))).astype(np.int64)


def signed_log_bins(delta: Floats) -> Bins:
    """Whole decades to both sides: from below the first percentile of the sizes that are not 0 to the largest."""
    sizes = np.abs(delta)
    lowest, highest = _decades(sizes[sizes > 0])
    reach = (highest - lowest) * BINS_PER_DECADE
    far = sizes >= 10.0**lowest
    steps = np.zeros(delta.size, dtype=np.int64)
    # A value on an edge may round to the step below the first or beyond the last; it belongs to its neighbour.
    exact = (np.log10(sizes[far]) - lowest) * BINS_PER_DECADE
    steps[far] = np.clip(np.floor(exact).astype(np.int64) + 1, 1, reach)
    slots = np.sign(delta).astype(np.int64) * steps + reach
    return Bins(lowest, list(range(-reach, reach + 1)), np.bincount(slots, minlength=2 * reach + 1).tolist())


def _decades(sizes: Floats) -> tuple[int, int]:
    if not sizes.size:
        return LOWEST_DECADE, LOWEST_DECADE + 1
    lowest = max(LOWEST_DECADE, int(np.floor(np.log10(np.quantile(sizes, 0.01, method="lower")))))
    return lowest, max(lowest, int(np.floor(np.log10(sizes.max())))) + 1

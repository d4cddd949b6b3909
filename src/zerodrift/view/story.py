"""Several kinds of training side by side, as one page: a band over seeds for each, step by step, and a row of words.

Plain numbers in, so that the page can be rendered wherever they were kept. A band reaches from the least run to the largest; with a
handful of runs there is nothing finer to draw.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerodrift import __version__
from zerodrift.view.figure import Line, Trace, axis, figure, line, short
from zerodrift.view.page import render_page, text
from zerodrift.view.plots import Plot
from zerodrift.view.report import plotly

COLOURS = ("var(--ink)", "var(--more)", "var(--less)", "var(--pass)", "var(--fail)", "var(--inconclusive)")
DASHES = ("solid", "dash", "dot")
"""Behind the sixth kind the colours come again, broken."""

Point = tuple[float, float, float] | None
"""Mean, least and largest of one step; None where not every run shows it."""


class StoryLine(NamedTuple):
    """One kind of training."""

    name: str
    title: str
    runs: str
    """How many, of how many steps."""
    differs: str
    """In what, from what it is held against."""
    monitor: str
    receipt: str
    blame: str
    steps: Mapping[str, Sequence[Point]]
    """By quantity."""


class Panel(NamedTuple):
    """One figure."""

    name: str
    """Of the quantity."""
    title: str
    message: str
    logarithmic: bool = False


PANELS = (
    Panel("reward", "Reward", "Mean of the rollouts of each step."),
    Panel("clip_rate", "Clip rate", "Share of tokens in sequences whose ratio the objective's bounds cut off. Without lag it is the engine's doing alone."),
    Panel("ess", "ESS", "Effective share of a step's tokens, by their ratios as they are. 1 where engine and trainer agree."),
    Panel("kl", "KL to the engine", "Mean k3 of the trainer's numbers against the engine's, in nats per token; a 0 has no place on this axis.", logarithmic=True),
    Panel("mismatch", "Mismatch", "Mean of |engine − trainer| over all tokens, in nats; a 0 has no place on this axis.", logarithmic=True),
    Panel("entropy", "Entropy", "Mean of −log p of what was sampled, by the engine's own numbers."),
)  # fmt: skip


def render_story(kinds: Sequence[StoryLine], notes: Sequence[str]) -> str:
    """The page; a quantity that no kind shows has no figure."""
    plots = [
        _plot(panel, kinds) for panel in PANELS if any(any(kind.steps.get(panel.name, ())) for kind in kinds)
    ]
    content = {
        "kinds": kinds,
        "notes": notes,
        "plots": plots,
        "figures": {plot.key: plot.figure for plot in plots},
        "version": __version__,
    }
    own = text("report.js")
    return render_page("story.html", content, [plotly(), own] if plots else [own])


def _plot(panel: Panel, kinds: Sequence[StoryLine]) -> Plot:
    traces = [
        trace
        for place, kind in enumerate(kinds)
        for trace in _band(
            kind, panel, COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
        )
    ]
    settings = {"type": "log", "exponentformat": "power", "dtick": 1} if panel.logarithmic else {}
    return Plot(
        panel.name, panel.title, panel.message, figure(traces, axis("step"), axis(panel.title, **settings))
    )


def _band(kind: StoryLine, panel: Panel, colour: str, dash: str) -> list[Trace]:
    """The mean as a line with a name, and the ends of the band as two thin ones that share its place in the legend."""
    points = [(step, point) for step, point in enumerate(kind.steps.get(panel.name, ())) if point is not None]
    steps = [step for step, _ in points]
    traces = []
    for place, width in enumerate((2, 1, 1)):
        style: Line = {"color": colour, "width": width, "dash": dash if place == 0 else "dot"}
        values = [
            value if value > 0 or not panel.logarithmic else None
            for value in short(point[place] for _, point in points)
        ]
        trace = line(kind.title, steps, values, style)
        traces.append(
            trace | {"legendgroup": kind.name, "showlegend": place == 0, "opacity": 1 if place == 0 else 0.5}
        )
    return traces

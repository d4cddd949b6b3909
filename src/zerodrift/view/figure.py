"""The few shapes that every figure of the report is drawn with, in Plotly's schema.

Figures are plain values (a test validates them against the schema) and hold numbers and our own words only: Plotly
reads markup in the texts that it draws, so no text of a model may come near it. Colours are names of CSS variables,
which the page resolves for light and dark.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Trace = dict[str, Any]
Line = dict[str, str | float]

HEIGHT = 400
"""Pixels: two rows of legend on a phone leave 240 to the plot."""
INK: Line = {"color": "var(--ink)", "width": 2}


class Mark(NamedTuple):
    """A size that others are compared with."""

    name: str
    value: float
    line: Line


def marks(floor: float | None, gate: float | None) -> list[Mark]:
    """Floor and gate of the mean |Δ|, as far as the run knows them; a floor of 0 is no line on a log axis."""
    found = []
    if floor:
        found.append(Mark("floor", floor, {"color": "var(--floor)", "width": 2, "dash": "dot"}))
    if gate:
        found.append(Mark("gate", gate, {"color": "var(--gate)", "width": 2, "dash": "dash"}))
    return found


def line(name: str, x: Iterable[float | None], y: Iterable[float | None], style: Line) -> Trace:
    """A line that the legend names."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": style,
        "hoverinfo": "skip",
    }


def cloud(name: str, x: npt.NDArray[Any], y: Floats, colour: str, hover: str) -> Trace:
    """Points; `hover` is a template of Plotly's."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": short(x),
        "y": short(y),
        "marker": {"color": colour, "size": 5, "opacity": 0.6},
        "hovertemplate": f"{hover}<extra></extra>",
    }


def axis(title: str, **settings: Any) -> dict[str, Any]:
    """An axis that makes room for its own labels."""
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "var(--grid)",
        "linecolor": "var(--grid)",
        "zeroline": False,
        "automargin": True,
        **settings,
    }


def size_axis() -> dict[str, Any]:
    """|Δ| on a logarithmic axis, one line per decade."""
    return axis("|Δ| in nats", type="log", exponentformat="power", dtick=1)


def figure(traces: list[Trace], x_axis: dict[str, Any], y_axis: dict[str, Any]) -> dict[str, Any]:
    """Traces on two axes, with the legend below so that a phone's width is left to the plot."""
    layout = {
        "height": HEIGHT,
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "var(--ink)", "size": 12},
        "hoverlabel": {
            "bgcolor": "var(--raised)",
            "bordercolor": "var(--grid)",
            "font": {"color": "var(--ink)"},
        },
        "hovermode": "closest",
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "x": 0,
            "xanchor": "left",
        },
        "xaxis": x_axis,
        "yaxis": y_axis,
    }
    return {"data": traces, "layout": layout}


def short(values: Iterable[Any]) -> list[float]:
    """Four digits, which is what a screen can show; whole numbers, which are names, keep all of theirs."""
    return [float(value) if float(value).is_integer() else float(f"{float(value):.4g}") for value in values]

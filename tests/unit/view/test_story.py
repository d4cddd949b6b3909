"""The page of trainings side by side: every kind has its line in every figure, and nothing of a text can act."""

import plotly.graph_objects as plotly
import pytest

from zerodrift.view.story import COLOURS, PANELS, StoryLine, _plot, render_story


def told(name, **steps):
    return StoryLine(
        name,
        f"title of {name}",
        "3 runs of 2 steps",
        "differs <script>",
        "monitor",
        "receipt",
        "blame",
        steps,
    )


KINDS = [
    told("sound", reward=[(0.5, 0.4, 0.6), None, (0.7, 0.6, 0.8)], mismatch=[(0.0, 0.0, 0.0)] * 3),
    told("raw", reward=[(0.5, 0.4, 0.6)] * 3, mismatch=[(0.2, 0.1, 0.3)] * 3),
]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.name)
def test_a_figure_is_valid_and_names_each_kind_once(panel):
    figure = _plot(panel, KINDS).figure
    plotly.Figure(data=[{**trace, "line": {**trace["line"], "color": "black"}} for trace in figure["data"]])
    assert [trace["name"] for trace in figure["data"] if trace["showlegend"]] == [
        "title of sound",
        "title of raw",
    ]


def test_a_step_that_not_every_run_shows_is_left_out_and_a_zero_has_no_place_on_a_logarithm():
    reward, mismatch = PANELS[0], next(panel for panel in PANELS if panel.name == "mismatch")
    assert _plot(reward, KINDS).figure["data"][0]["x"] == [0, 2]
    assert _plot(mismatch, KINDS).figure["data"][0]["y"] == [None] * 3
    assert _plot(mismatch, KINDS).figure["data"][3]["y"] == [0.2] * 3


def test_more_kinds_than_colours_have_broken_lines():
    many = [told(str(number), reward=[(0.5, 0.4, 0.6)]) for number in range(len(COLOURS) + 1)]
    first, last = (_plot(PANELS[0], many).figure["data"][place] for place in (0, 3 * len(COLOURS)))
    assert (first["line"]["color"], first["line"]["dash"]) == (COLOURS[0], "solid")
    assert (last["line"]["color"], last["line"]["dash"]) == (COLOURS[0], "dash")


def test_the_page_has_figures_of_what_was_measured_and_shows_texts_as_texts():
    page = render_story(KINDS, ["2 trainings"])
    assert 'id="plot-reward"' in page
    assert 'id="plot-ess"' not in page
    assert "differs &lt;script&gt;" in page
    empty = render_story([told("sound")], [])
    assert "No step was done yet" in empty

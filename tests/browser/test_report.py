"""What does a real browser make of the report? Plots are drawn, the policy holds, and no text of a model acts.

Marked `browser`: needs Chromium, see conftest.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerodrift.view.report import write_report

pytestmark = pytest.mark.browser

Runs = dict[str, Callable[[Path], Path]]
PHONE, DESKTOP = 390, 1280
DRAWN = {"passing": 4, "failing": 4, "hostile": 4, "exact": 1, "inconclusive": 0}


@pytest.fixture(scope="module")
def reports(example_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("reports")
    return {name: write_report(make(base / name)) for name, make in example_runs.items()}


def brightness(page: Any, element: str, rule: str) -> float:
    """Mean of red, green and blue of a computed colour, 0 to 255."""
    colour = page.evaluate(f"getComputedStyle(document.querySelector({element!r}))[{rule!r}]")
    red, green, blue = colour.removeprefix("rgba(").removeprefix("rgb(").rstrip(")").split(",")[:3]
    return (float(red) + float(green) + float(blue)) / 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", DRAWN)
def test_the_page_is_drawn_and_says_nothing_else(
    browser: Any, reports: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    page = browser.open(reports[name], width=width, dark=dark)
    assert page.evaluate("document.querySelectorAll('.plot .main-svg').length > 0") is (DRAWN[name] > 0)
    assert page.evaluate("document.querySelectorAll('.plot.js-plotly-plot').length") == DRAWN[name]
    # A plot that failed to draw its data is an empty frame.
    drawn = "document.querySelectorAll('.plot .point, .plot .points path').length"
    assert (page.evaluate(drawn) > 0) is (DRAWN[name] > 0)
    assert page.said() == [], "the console must be empty: policy violations and errors land there"
    assert page.requests() == [reports[name].as_uri()], "the page asked for something besides itself"
    assert page.evaluate("document.documentElement.scrollWidth") == width, "the page scrolls sideways"
    assert (
        page.evaluate("Math.max(0, ...[...document.querySelectorAll('.plot svg')].map(s => s.clientWidth))")
        <= width
    )


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_first_screen_answers(browser: Any, reports: dict[str, Path], width: int) -> None:
    page = browser.open(reports["failing"], width=width, height=844)
    bottom = "document.querySelector('header .type-this').getBoundingClientRect().bottom"
    assert page.evaluate(bottom) < 600
    assert page.evaluate("document.querySelector('header .type-this code').innerText") == (
        "--logprobs-mode processed_logprobs"
    )


def test_colours_follow_the_scheme(browser: Any, reports: dict[str, Path]) -> None:
    page = browser.open(reports["failing"], width=DESKTOP, dark=False)
    tick = ".plot .xtick text"
    light = brightness(page, "body", "backgroundColor"), brightness(page, tick, "fill")
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    page.call("Emulation.setEmulatedMedia", features=[scheme])
    page.wait_for("getComputedStyle(document.querySelector('.plot .xtick text')).fill !== 'rgb(27, 31, 36)'")
    dark = brightness(page, "body", "backgroundColor"), brightness(page, tick, "fill")
    assert light[0] > 200
    assert light[1] < 60
    assert dark[0] < 60
    assert dark[1] > 180
    assert page.said() == []


def test_hostile_text_does_nothing(browser: Any, reports: dict[str, Path]) -> None:
    page = browser.open(reports["hostile"], width=DESKTOP)
    assert page.evaluate("document.title") != "owned"
    assert page.evaluate("document.title.startsWith('FAIL')")
    assert page.evaluate("document.querySelectorAll('img, iframe, header script, main script').length") == 0
    assert page.evaluate("document.querySelector('main').innerText.includes('document.title')")
    # Each token keeps its place: what a right-to-left mark would turn around is still in the order of the rows.
    lefts = "[...document.querySelectorAll('.context')[1].querySelectorAll('.token')].map(t => t.offsetLeft)"
    tops = lefts.replace("offsetLeft", "offsetTop")
    places = list(zip(page.evaluate(tops), page.evaluate(lefts), strict=True))
    assert places == sorted(places)


def test_the_policy_stops_what_an_escape_might_miss(
    browser: Any, reports: dict[str, Path], tmp_path: Path
) -> None:
    """Planted: the same page with an unescaped script, an inline handler and an image from elsewhere."""
    planted = (
        "<script>document.title='owned'</script>"
        "<img src='http://127.0.0.1:9/x.png' onerror=\"document.title='owned'\">"
    )
    text = reports["passing"].read_text(encoding="utf-8").replace("</main>", planted + "</main>")
    path = tmp_path / "planted.html"
    path.write_text(text, encoding="utf-8")
    page = browser.open(path, width=DESKTOP)
    assert page.evaluate("document.title") != "owned"
    assert len([said for said in page.said() if "Content Security Policy" in said]) >= 3
    assert page.evaluate("document.querySelectorAll('.plot.js-plotly-plot').length") == 4


@pytest.mark.parametrize(
    ("allowed", "answer", "where"),
    [
        ("granted", "Copied", "navigator.clipboard.readText()"),
        ("denied", "Selected", "getSelection().toString()"),
    ],
)
def test_the_fix_can_be_copied(
    browser: Any, reports: dict[str, Path], allowed: str, answer: str, where: str
) -> None:
    page = browser.open(reports["failing"], width=DESKTOP)
    for name in ("clipboard-write", "clipboard-read"):
        page.call("Browser.setPermission", permission={"name": name}, setting=allowed)
    page.call("Page.bringToFront")
    page.evaluate("document.querySelector('.type-this button').click()")
    page.wait_for(f"document.querySelector('.type-this button').textContent === '{answer}'")
    assert page.evaluate(where) == "--logprobs-mode processed_logprobs"


def test_a_finger_scrolls_past_a_plot_and_a_mouse_zooms(browser: Any, reports: dict[str, Path]) -> None:
    for width, mode in ((PHONE, False), (DESKTOP, "zoom")):
        page = browser.open(reports["failing"], width=width)
        assert page.evaluate("document.getElementById('plot-position')._fullLayout.dragmode") == mode


def test_plots_follow_the_window(browser: Any, reports: dict[str, Path]) -> None:
    page = browser.open(reports["failing"], width=DESKTOP)
    page.call(
        "Emulation.setDeviceMetricsOverride", width=PHONE, height=844, deviceScaleFactor=1, mobile=False
    )
    page.wait_for("document.querySelector('.plot .main-svg').clientWidth < 390")
    page.wait_for("document.documentElement.scrollWidth === 390")

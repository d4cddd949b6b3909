"""The audit report: one HTML page that answers on its first screen and proves it below.

Rendered from a run directory alone, without torch, so that an old run can be looked at on a laptop. The page loads
nothing and shows every foreign string as text (see `page`).
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from zerodrift import __version__
from zerodrift.core.cause import CAUSES
from zerodrift.core.errors import MissingExtra
from zerodrift.records.codec import write_atomically
from zerodrift.view.page import lines, one_newline, render_page, text
from zerodrift.view.panels import compare, usability, worst
from zerodrift.view.plots import plots
from zerodrift.view.run_directory import FinishedRun, read
from zerodrift.view.verdict import HEADLINES, gauges, guilty, next_step, scope

REPORT = "report.html"


def write_report(run_directory: Path) -> Path:
    """Render `run_directory` into its report.html: the whole page or the old one, never half."""
    path = run_directory / REPORT
    write_atomically(path, render(run_directory).encode())
    return path


def render(run_directory: Path) -> str:
    """The page of a finished run."""
    content = _content(read(run_directory))
    own = text("report.js")
    # Without figures Plotly's five megabytes would draw nothing.
    scripts = [plotly(), own] if content["figures"] else [own]
    return render_page("report.html", content, scripts)


def _content(run: FinishedRun) -> dict[str, Any]:
    tokens = run.tokens
    figures = plots(tokens, run.record) if tokens is not None else ()
    return {
        "run": run,
        "record": run.record,
        "headline": HEADLINES[run.record.verdict],
        "guilty": guilty(run.record),
        "sentence": run.record.side.partition(": ")[2],
        "next_step": next_step(run.record),
        "scope": scope(run.record),
        "causes": CAUSES,
        "gauges": gauges(run.record),
        "plots": figures,
        "figures": {plot.key: plot.figure for plot in figures},
        "impossible": 0 if tokens is None else int((~tokens.possible).sum()),
        "usability": None if tokens is None else usability(tokens),
        "worst": () if tokens is None else worst(tokens),
        "fingerprints": compare(run.record.engine, run.record.reference),
        "config": None if run.config is None else lines(run.config),
        "environment": run.environment,
        "version": __version__,
    }


@lru_cache(maxsize=1)
def plotly() -> str:
    """Plotly's own script, whole."""
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 (optional, as Jinja is)
    except ModuleNotFoundError as error:
        raise MissingExtra("the plots of report.html need Plotly: pip install 'zerodrift[local]'") from error
    return one_newline(get_plotlyjs())

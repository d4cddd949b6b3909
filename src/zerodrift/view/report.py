"""The audit report: one HTML page that answers on its first screen and proves it below.

Rendered from a run directory alone, without torch, so that an old run can be looked at on a laptop. The page loads
nothing, runs only scripts that its own policy names by hash, and shows every foreign string through `visible`: the
template engine applies it to whatever a template prints, so that no template can forget.
"""

from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerodrift import __version__
from zerodrift.core.cause import CAUSES
from zerodrift.core.errors import MissingExtra
from zerodrift.records.codec import write_atomically
from zerodrift.view import notation
from zerodrift.view.answers import answers
from zerodrift.view.facts import compare
from zerodrift.view.gauges import gauges
from zerodrift.view.plots import plots
from zerodrift.view.policy import content_policy
from zerodrift.view.run_directory import LONGEST_DOCUMENT, Run, read
from zerodrift.view.usability import usability
from zerodrift.view.visible import LONGEST_TYPED, visible
from zerodrift.view.worst import worst

if TYPE_CHECKING:
    import jinja2

REPORT = "report.html"
TEMPLATES = "templates"


def write_report(run_directory: Path) -> Path:
    """Render `run_directory` into its report.html: the whole page or the old one, never half."""
    path = run_directory / REPORT
    write_atomically(path, render(run_directory).encode())
    return path


def render(run_directory: Path) -> str:
    """The page of a finished run."""
    content = _content(read(run_directory))
    own = _text("report.js")
    # Without figures Plotly's five megabytes would draw nothing.
    scripts = [_plotly(), own] if content["figures"] else [own]
    return (
        _environment()
        .get_template("report.html")
        .render(
            **content,
            policy=content_policy(scripts),
            styles=_text("report.css"),
            scripts=scripts,
        )
    )


def _content(run: Run) -> dict[str, Any]:
    tokens = run.tokens
    figures = plots(tokens, run.record) if tokens is not None else ()
    return {
        "run": run,
        "record": run.record,
        "answers": answers(run.record),
        "causes": CAUSES,
        "gauges": gauges(run.record),
        "plots": figures,
        "figures": {plot.key: plot.figure for plot in figures},
        "impossible": 0 if tokens is None else int((~tokens.possible).sum()),
        "usability": None if tokens is None else usability(tokens),
        "worst": () if tokens is None else worst(tokens),
        "fingerprints": compare(run.record.engine, run.record.reference),
        "config": None if run.config is None else _lines(run.config),
        "version": __version__,
    }


def _lines(document: str) -> list[str]:
    lines = document[:LONGEST_DOCUMENT].split("\n")
    if len(document) > LONGEST_DOCUMENT:
        lines.append(f"… ({len(document):,} characters; the file has them all)")
    return lines


@lru_cache(maxsize=1)
def _environment() -> "jinja2.Environment":
    try:
        import jinja2  # noqa: PLC0415 (optional: the terminal summary works without)
        from markupsafe import Markup  # noqa: PLC0415 (comes with it)
    except ModuleNotFoundError as error:
        raise MissingExtra("report.html needs Jinja: pip install 'zerodrift[local]'") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("zerodrift.view", TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup, which is a subclass of str, is ours; every plain string is somebody else's.
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False}
    environment.filters["typed"] = lambda text: Markup.escape(visible(text, LONGEST_TYPED))
    for form in (notation.number, notation.signed, notation.count, notation.share, notation.fact):
        environment.filters[form.__name__] = form
    return environment


@lru_cache(maxsize=1)
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 (optional, as above)
    except ModuleNotFoundError as error:
        raise MissingExtra("the plots of report.html need Plotly: pip install 'zerodrift[local]'") from error
    return _one_newline(get_plotlyjs())


def _text(name: str) -> str:
    return _one_newline(
        resources.files("zerodrift.view").joinpath(TEMPLATES, name).read_text(encoding="utf-8")
    )


def _one_newline(text: str) -> str:
    # A browser reads \r\n as \n before it hashes a script.
    return text.replace("\r\n", "\n")

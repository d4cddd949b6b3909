"""One self-contained page out of a template: what every page of ours promises, in one place.

It loads nothing, runs only scripts that its own policy names by hash, and shows every foreign string through `visible`:
the template engine applies it to whatever a template prints, so that no template can forget. Should an escape ever fail,
the browser still refuses to run what a model wrote, to load anything, or to send anything anywhere.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from zerodrift.core.errors import MissingExtra
from zerodrift.view import notation
from zerodrift.view.run_directory import LONGEST_DOCUMENT
from zerodrift.view.visible import LONGEST_TYPED, visible

if TYPE_CHECKING:
    import jinja2

TEMPLATES = "templates"


def render_page(template: str, content: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """`template` with `content`, our styles, and `scripts`, which alone may run."""
    return (
        _environment()
        .get_template(template)
        .render(**content, policy=content_policy(scripts), styles=text("report.css"), scripts=scripts)
    )


def text(name: str) -> str:
    """A file beside the templates."""
    return one_newline(
        resources.files("zerodrift.view").joinpath(TEMPLATES, name).read_text(encoding="utf-8")
    )


def one_newline(script: str) -> str:
    """As a browser reads it before it hashes it: \\r\\n is \\n."""
    return script.replace("\r\n", "\n")


def lines(document: str) -> list[str]:
    """Of a document that is shown whole, or up to a length and with a word about the rest."""
    shown = document[:LONGEST_DOCUMENT].split("\n")
    if len(document) > LONGEST_DOCUMENT:
        shown.append(f"… ({len(document):,} characters; the file has them all)")
    return shown


@lru_cache(maxsize=1)
def _environment() -> "jinja2.Environment":
    try:
        import jinja2  # noqa: PLC0415 (optional: the terminal summary works without)
        from markupsafe import Markup  # noqa: PLC0415 (comes with it)
    except ModuleNotFoundError as error:
        raise MissingExtra("a page in HTML needs Jinja: pip install 'zerodrift[local]'") from error
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
    environment.filters["typed"] = lambda command: Markup.escape(visible(command, LONGEST_TYPED))
    for form in (notation.number, notation.signed, notation.count, notation.share, notation.fact):
        environment.filters[form.__name__] = form
    return environment


def source_hash(script: str) -> str:
    """The name of an inline script in a policy."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def content_policy(scripts: Sequence[str]) -> str:
    """The Content-Security-Policy of a page that holds `scripts` and is otherwise inert."""
    # Plotly sets style attributes on what it draws, which only 'unsafe-inline' allows; styles cannot fetch, since
    # default-src 'none' also covers images and fonts.
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(source_hash(script) for script in scripts)}",
            "style-src 'unsafe-inline'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )

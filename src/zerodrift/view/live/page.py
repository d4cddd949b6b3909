"""The page itself: one answer with its styles and its script inside, which a nonce names and nothing else may run."""

import html
import secrets
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

from zerodrift import __version__
from zerodrift.view.visible import visible

SCRIPTS = ("plot.js", "cards.js", "batches.js", "live.js")
"""In this order: each uses what those before it define."""
COMMON = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
"""Headers of every answer."""
INERT = "default-src 'none'; frame-ancestors 'none'"
"""Policy of answers that are no page."""


class Page(NamedTuple):
    """What is sent, and the policy that goes with it."""

    body: bytes
    policy: str


def live_page(name: str) -> Page:
    """A page of its own for every request: a nonce that is used twice protects nothing."""
    nonce = secrets.token_urlsafe(18)
    parts = {
        "NONCE": nonce,
        "NAME": html.escape(visible(name)),
        "VERSION": html.escape(__version__),
        "STYLES": _file("live.css"),
        "SCRIPT": "\n".join(_file(script) for script in SCRIPTS),
    }
    text = _file("live.html")
    for key, value in parts.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src 'nonce-{nonce}'",
            f"style-src 'nonce-{nonce}'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(text.encode(), policy)


@lru_cache(maxsize=8)
def _file(name: str) -> str:
    return resources.files("zerodrift.view.live").joinpath("page", name).read_text(encoding="utf-8")

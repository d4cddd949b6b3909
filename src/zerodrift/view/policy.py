"""Which scripts may run on the page? Ours, named by their hashes, and nothing else.

Text on the page comes from models. It is escaped; should an escape ever fail, the browser still refuses to run it,
to load anything, or to send anything anywhere.
"""

import base64
import hashlib
from collections.abc import Sequence


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

"""What one server is told at its start. Torch-free."""

from pathlib import Path

import msgspec

from zerodrift.serve.limits import ServeLimits


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one server."""

    model: str
    """As clients call it."""
    role: str = "serving"
    weight_root: Path | None = None
    """Below which updates and adapters are read; None: none are taken."""
    state: Path | None = None
    """Where versions are kept; None: for as long as the server runs."""
    limits: ServeLimits = ServeLimits()

"""The proxy, put together: an engine elsewhere, the trainer's model here, and the sockets between clients and both."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from zerodrift.backends.http import HttpClient
from zerodrift.serve.access import ServeAccess
from zerodrift.serve.limits import ServeLimits
from zerodrift.serve.listening import QuietServer, http_server
from zerodrift.serve.shadow.app import ShadowApp, ShadowParts
from zerodrift.serve.shadow.canaries import CanaryTaker
from zerodrift.serve.shadow.control import ShadowControl
from zerodrift.serve.shadow.drain import Drain
from zerodrift.serve.shadow.facts import facts_of
from zerodrift.serve.shadow.figures import ShadowFigures
from zerodrift.serve.shadow.receipts import ShadowReceipts
from zerodrift.serve.shadow.reference import ShadowReference
from zerodrift.serve.shadow.scorer import ShadowScorer
from zerodrift.serve.shadow.upstream import Upstream
from zerodrift.serve.shadow.versions import EngineVersions
from zerodrift.sync.key import read_key
from zerodrift.sync.ledger import ReceiptLedger

FACTS_S = 30.0
"""For the engine to say how it is set up; it is asked after each update."""


class ShadowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one proxy."""

    model: str
    url: str
    key: str | None = None
    """The engine's own."""
    rescore_every: int = 100
    """One answer in so many; 0: none, and the model is not loaded."""
    dtype: str = "float32"
    weight_root: Path | None = None
    drains: bool = False
    receipts: Path | None = None
    """Where they are written; None: none are taken."""
    receipt_key: Path | None = None
    receipt_tokens: int = 1024
    requires_receipt: bool = False
    limits: ServeLimits = ServeLimits()


class ShadowServer:
    """Serves on sockets that are bound already, until it is told to stop."""

    def __init__(self, access: ServeAccess, settings: ShadowSettings) -> None:
        """The address is looked at and the model is loaded here; the engine may come later."""
        self._access, self.settings = access, settings
        self.figures = ShadowFigures()
        self._upstream = Upstream(settings.url, settings.key)
        self._facts = HttpClient(settings.url, api_key=settings.key, timeout_s=FACTS_S, concurrency=1)
        self.reference = (
            ShadowReference(settings.model, settings.dtype, settings.weight_root)
            if settings.rescore_every or settings.receipts is not None
            else None
        )
        self._canaries = self._opened()
        self._server: QuietServer | None = None

    def _opened(self) -> CanaryTaker | None:
        settings = self.settings
        if settings.receipts is None:
            return None
        assert settings.receipt_key is not None, "receipts are sealed"
        assert self.reference is not None, "a receipt needs both sides"
        ledger = ReceiptLedger(settings.receipts, read_key(settings.receipt_key))
        return CanaryTaker(
            self.reference, ledger, self._upstream.address, settings.key, settings.receipt_tokens
        )

    def run(self, sockets: list[socket.socket], ready: Callable[[], None] = lambda: None) -> None:
        """Until SIGTERM, SIGINT or `stop`; what is in flight ends first, within `drain_s`."""
        asyncio.run(self._run(sockets, ready))

    def stop(self) -> None:
        """From any thread, once it is ready."""
        assert self._server is not None, "stop() came before the server was ready"
        self._server.should_exit = True

    async def _run(self, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        settings, versions = self.settings, EngineVersions()
        scorer = None
        if self.reference is not None:
            scorer = ShadowScorer(
                self.reference, settings.rescore_every, lambda: facts_of(self._facts), self.figures.mismatch
            )
        drain = Drain(versions, settings.limits.drain_s, on=settings.drains)
        receipts = None
        if self._canaries is not None and scorer is not None:
            receipts = ShadowReceipts(
                versions, self._canaries, scorer.behind, self.figures, required=settings.requires_receipt
            )
        control = ShadowControl(versions, drain, scorer, receipts, self.figures)
        parts = ShadowParts(self._upstream, versions, drain, control, scorer, self.figures, receipts)
        self._server = http_server(ShadowApp(self._access, settings.limits, parts), settings.limits)
        ready()
        try:
            await self._server.serve(sockets)
        finally:
            self._upstream.close()
            if scorer is not None:
                await asyncio.to_thread(scorer.close)
            if self._canaries is not None:
                self._canaries.close()
            self._facts.close()

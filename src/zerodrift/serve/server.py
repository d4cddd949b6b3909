"""The server, put together: an engine, its routes, and the sockets that it listens on."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.serve.access import ServeAccess
from zerodrift.serve.adapters import ServedAdapters
from zerodrift.serve.app import App
from zerodrift.serve.bridge import Bridge
from zerodrift.serve.control import Control
from zerodrift.serve.figures import Figures
from zerodrift.serve.generation import Generation
from zerodrift.serve.listening import http_server
from zerodrift.serve.routes import ROUTES
from zerodrift.serve.settings import ServeSettings
from zerodrift.serve.status import StatusRoutes
from zerodrift.serve.watch import EngineWatch
from zerodrift.serve.weight_updates import WeightUpdates

log = logging.getLogger("zerodrift.serve")


class RolloutServer:
    """Serves one engine on sockets that are bound already, until it is told to stop."""

    def __init__(self, engine: Engine, access: ServeAccess, settings: ServeSettings) -> None:
        self._engine, self._settings = engine, settings
        self.figures = Figures()
        self._app = App(access, settings.limits, self.figures)
        self._server = http_server(self._app, settings.limits)

    def run(self, sockets: list[socket.socket], ready: Callable[[], None] = lambda: None) -> None:
        """Until SIGTERM, SIGINT or `stop`; what is in flight ends first, within `drain_s`."""
        asyncio.run(self._run(sockets, ready))

    def stop(self) -> None:
        """From any thread."""
        self._server.should_exit = True

    async def _run(self, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        loop = EngineLoop(self._engine)
        weights = WeightUpdates(loop, root=self._settings.weight_root, state=self._settings.state)
        bridge = Bridge(loop, self._settings.limits)
        settings = self._settings
        adapters = ServedAdapters(loop, settings)
        control = Control(bridge, weights, adapters, settings, self.figures)
        watch = EngineWatch(bridge, self.figures)
        status = StatusRoutes(loop, watch, adapters, settings, self.figures)
        generation = Generation(bridge, adapters, settings, self.figures)
        self._app.handlers = _handlers(generation, control, status)
        looking = asyncio.create_task(watch.run())
        self._server.on_exit = lambda: _let_go(loop)
        try:
            await watch.canary()
            ready()
            await self._server.serve(sockets)
        finally:
            looking.cancel()
            bridge.close()
            control.close()
            # Whoever still waited was cut off by now.
            await asyncio.to_thread(loop.stop, drain=False)
            weights.close()


def _let_go(loop: EngineLoop) -> None:
    """A pause would keep what is in flight from its end."""
    if loop.paused:
        log.warning("the server stops while it is paused; what is in flight goes on")
        threading.Thread(target=loop.resume, daemon=True).start()


def _handlers(*parts: object) -> dict[str, Any]:
    """By the names in the table; one that nobody has is a bug."""
    names = {route.handler for route in ROUTES}
    return {name: next(getattr(part, name) for part in parts if hasattr(part, name)) for name in names}

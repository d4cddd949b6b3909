"""Prometheus: the last decision as gauges, and counters since the start, in the text format that it scrapes.

Written here and not by `prometheus-client`: the format of gauges and counters is a few lines, and this package has to run
inside anybody's trainer with nothing else installed. A test reads it with that client's own parser where there is one.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from zerodrift.core.errors import InvalidValue
from zerodrift.integrations.metrics import MEANINGS, PREFIX, metrics_of
from zerodrift.monitor.decision import Code, Decision, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exported(name: str) -> str:
    """`zerodrift/mismatch/k3` as Prometheus may call it."""
    return name.replace("/", "_")


GAUGES: Mapping[str, str] = {
    **{exported(PREFIX + name): message for name, message in MEANINGS.items()},
    "zerodrift_step": "step of the last decision",
}
COUNTERS: Mapping[str, str] = {
    "zerodrift_batches_total": "batches judged, by state",
    "zerodrift_reasons_total": "reasons given, by code",
}
NAMES = frozenset({*GAUGES, *COUNTERS})
"""All that a dashboard may ask for."""


class Prometheus:
    """Into a file for node_exporter's textfile collector, or on a port that Prometheus scrapes, or both."""

    def __init__(
        self, path: str | Path | None = None, *, port: int | None = None, host: str = "127.0.0.1"
    ) -> None:
        """`path` must end in .prom, which is what the collector reads. Port 0 takes a free one (`port` tells which)."""
        if path is None and port is None:
            raise InvalidValue("a Prometheus sink without a path and without a port reaches nobody; give one")
        if path is not None and Path(path).suffix != ".prom":
            raise InvalidValue(f"{path} does not end in .prom; the textfile collector reads no other file")
        self._path = None if path is None else Path(path)
        self._states: Counter[State] = Counter()
        self._codes: Counter[Code] = Counter()
        self._text = self._rendered(None)
        self._server = None if port is None else _serve(self, host, port)

    @property
    def port(self) -> int | None:
        """That it listens on."""
        return None if self._server is None else int(self._server.server_address[1])

    @property
    def text(self) -> str:
        """What a scrape would get now."""
        return self._text

    def emit(self, decision: Decision) -> None:
        """Replaced as a whole: no scrape sees half of two steps."""
        self._states[decision.state] += 1
        self._codes.update(reason.code for reason in decision.reasons)
        self._text = self._rendered(decision)
        if self._path is not None:
            beside = self._path.with_suffix(".prom.tmp")
            beside.write_text(self._text, encoding="utf-8")
            beside.replace(self._path)

    def _rendered(self, decision: Decision | None) -> str:
        return "".join(f"{line}\n" for line in self._lines(decision))

    def _lines(self, decision: Decision | None) -> Iterator[str]:
        if decision is not None:
            told = {exported(name): value for name, value in metrics_of(decision).items()}
            for name, value in {**told, "zerodrift_step": float(decision.step)}.items():
                yield from _head(name, GAUGES[name], "gauge")
                yield f"{name} {value!r}"
        # Every label from the start, so that the first of its kind is an increase and not a new series.
        yield from _head("zerodrift_batches_total", COUNTERS["zerodrift_batches_total"], "counter")
        for state in State:
            yield f'zerodrift_batches_total{{state="{state}"}} {self._states[state]}'
        yield from _head("zerodrift_reasons_total", COUNTERS["zerodrift_reasons_total"], "counter")
        for code in Code:
            yield f'zerodrift_reasons_total{{code="{code}"}} {self._codes[code]}'

    def close(self) -> None:
        """Stop listening; a file stays, with the last decision."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def _head(name: str, message: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {message}"
    yield f"# TYPE {name} {kind}"


def _serve(sink: Prometheus, host: str, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = sink.text.encode() if found else b"metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("content-type", CONTENT_TYPE)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """A trainer's log is no place for every scrape."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="zerodrift-prometheus", daemon=True).start()
    return server

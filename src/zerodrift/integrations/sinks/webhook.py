"""POST on a change of state: somebody is called when a batch is kept back, and when it is over.

A training never waits longer than `timeout_s` for it: the request runs on a thread of its own, since httpx's timeouts are
those of single operations and a server that sends a byte now and then could hold it forever. A change that was not
delivered is sent again with the next decision, and once more at the end. The address may be a secret (Slack's are), so
nothing but its host is ever logged, nor is any header.
"""

import logging
import threading
from collections.abc import Mapping

import httpx2
import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.integrations.metrics import metrics_of
from zerodrift.monitor.decision import Decision, State

logger = logging.getLogger("zerodrift.sinks")


class Webhook:
    """JSON with `text` (what Slack and Mattermost show), `step`, `state`, `before`, `reasons` and `metrics`."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0) -> None:
        """`headers`: an authorization, say."""
        require.real(InvalidValue, "timeout_s", timeout_s, "seconds that a training may wait", 0.001)
        self._host = _host(url)
        self._url, self._timeout_s = url, timeout_s
        self._client = httpx2.Client(headers=dict(headers or {}), timeout=timeout_s, trust_env=False)
        self._state = State.OK
        self._pending: bytes | None = None
        self._running: threading.Thread | None = None
        self.failures = 0
        """Attempts that were not answered with 2xx in time."""
        self.delivered = 0

    def __repr__(self) -> str:
        """Without what may be a secret."""
        return f"Webhook(host={self._host!r})"

    def emit(self, decision: Decision) -> None:
        """Nothing is sent while the state stays and everything was delivered."""
        if decision.state is not self._state:
            self._pending = _body(decision, self._state)
            self._state = decision.state
        self._send()

    def close(self) -> None:
        """Once more what was not delivered."""
        self._send()
        self._client.close()

    def _send(self) -> None:
        if self._pending is None:
            return
        if self._running is not None and self._running.is_alive():
            self._failed("the request before is still running")
            return
        # One list per attempt: a thread that answers too late writes into one that nobody reads.
        answer: list[str] = []
        self._running = threading.Thread(
            target=self._post, args=(self._pending, answer), name="zerodrift-webhook", daemon=True
        )
        self._running.start()
        self._running.join(self._timeout_s)
        if answer == [""]:
            self._pending = None
            self.delivered += 1
        else:
            self._failed(answer[0] if answer else f"no answer within {self._timeout_s:g} s")

    def _post(self, body: bytes, answer: list[str]) -> None:
        try:
            reply = self._client.post(self._url, content=body, headers={"content-type": "application/json"})
            answer.append("" if reply.is_success else f"status {reply.status_code}")
        # Its message may hold the address; its class does not.
        except Exception as error:  # a thread that raises would print a traceback with the address
            answer.append(type(error).__name__)

    def _failed(self, why: str) -> None:
        self.failures += 1
        logger.warning("webhook at %s: %s (%d failures so far)", self._host, why, self.failures)


def _host(url: str) -> str:
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError, TypeError):
        parsed = None
    if parsed is None or parsed.scheme not in {"http", "https"} or not parsed.host:
        # Not even a part of it is shown: what was given may be the secret itself.
        raise InvalidValue("the webhook's url is no http:// or https:// address")
    return str(parsed.host)


def _body(decision: Decision, before: State) -> bytes:
    why = "; ".join(reason.message for reason in decision.reasons)
    return msgspec.json.encode(
        {
            "text": f"zerodrift: {before} → {decision.state} at step {decision.step}"
            + (f": {why}" if why else ""),
            "step": decision.step,
            "state": decision.state,
            "before": before,
            "reasons": decision.reasons,
            "metrics": metrics_of(decision),
        }
    )

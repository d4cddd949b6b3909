"""POST on a change of state: somebody is called when a batch is kept back, and when it is over.

A training never waits longer than `timeout_s` for it: requests run on a thread of their own, since httpx's timeouts are
those of single operations and a server that sends a byte now and then could hold it forever. Changes that were not
delivered wait in their order, are sent again with the next decision, and once more at the end. So many wait at most; of more the
oldest are dropped, and the next that is delivered says how many. The address may be a secret (Slack's are), so nothing but its
host is ever logged, nor is any header.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import httpx2
import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.integrations.metrics import metrics_of
from zerodrift.monitor.decision import Decision, State

logger = logging.getLogger("zerodrift.sinks")

MOST_WAITING = 100
"""Changes, of a few kB each. A breaker that halts after three has as many in a night; one that flaps should not fill a memory."""
PATIENCE = 4
"""Times `timeout_s` that a request may take on its thread, while nobody waits for it."""


class Webhook:
    """JSON with `text` (what Slack and Mattermost show), `step`, `state`, `before`, `reasons` and `metrics`; `dropped` where some were."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0) -> None:
        """`headers`: an authorization, say."""
        require.real(InvalidValue, "timeout_s", timeout_s, "seconds that a training may wait", 0.001)
        self._host = _host(url)
        self._url, self._timeout_s = url, timeout_s
        # Longer than anybody waits: what is answered late was delivered, and is not sent twice.
        self._client = httpx2.Client(
            headers=dict(headers or {}), timeout=PATIENCE * timeout_s, trust_env=False
        )
        self._state = State.OK
        self._waiting: deque[dict[str, Any]] = deque()
        self._unsaid = self._said = 0
        self._running: threading.Thread | None = None
        self._answer: list[str] = []
        self.failures = 0
        """Attempts that were not answered with 2xx in time."""
        self.delivered = 0
        self.dropped = 0
        """Changes that nobody was told of, beyond MOST_WAITING."""

    def __repr__(self) -> str:
        """Without what may be a secret."""
        return f"Webhook(host={self._host!r})"

    def emit(self, decision: Decision) -> None:
        """Nothing is sent while the state stays and everything was delivered."""
        if decision.state is not self._state:
            self._waiting.append(_body(decision, self._state))
            self._state = decision.state
            self._drop()
        self._send()

    def close(self) -> None:
        """Once more what was not delivered."""
        self._send()
        self._client.close()

    def _drop(self) -> None:
        while len(self._waiting) > MOST_WAITING:
            # The first may be on its way.
            del self._waiting[1 if self._running is not None else 0]
            self.dropped += 1
            self._unsaid += 1
            logger.warning("webhook at %s: a change was dropped (%d so far)", self._host, self.dropped)

    def _send(self) -> None:
        """In order, until one fails or the time is over."""
        until = time.monotonic() + self._timeout_s
        if self._running is not None and self._running.is_alive():
            self._failed("the request before is still running")
            return
        while self._waiting:
            if self._running is None:
                self._running = self._started()
            self._running.join(max(0.0, until - time.monotonic()))
            if self._running.is_alive():
                self._failed(f"no answer within {self._timeout_s:g} s")
                return
            self._running = None
            if self._answer != [""]:
                self._failed(self._answer[0] if self._answer else "no answer")
                return
            self._waiting.popleft()
            self.delivered += 1
            self._unsaid -= self._said

    def _started(self) -> threading.Thread:
        body, self._said, self._answer = self._waiting[0], self._unsaid, []
        if self._said:
            told = f"{body['text']} ({self._said} changes before this one were dropped, unsent)"
            body = {**body, "text": told, "dropped": self._said}
        thread = threading.Thread(
            target=self._post,
            args=(msgspec.json.encode(body), self._answer),
            name="zerodrift-webhook",
            daemon=True,
        )
        thread.start()
        return thread

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


def _body(decision: Decision, before: State) -> dict[str, Any]:
    why = "; ".join(reason.message for reason in decision.reasons)
    return {
        "text": f"zerodrift: {before} → {decision.state} at step {decision.step}"
        + (f": {why}" if why else ""),
        "step": decision.step,
        "state": decision.state,
        "before": before,
        "reasons": decision.reasons,
        "metrics": metrics_of(decision),
    }

"""Which samples are held against the reference, and when: a thread of its own takes them one by one, in the order of events.

A change of weights stands in the same queue as samples do, so that whatever was made before it is scored before it.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from zerodrift.core.errors import ZerodriftError
from zerodrift.serve.shadow.figures import Mismatch
from zerodrift.serve.shadow.samples import Passed, Unscored, UpstreamFacts, samples_of

log = logging.getLogger("zerodrift.serve")
WAITING = 64
"""Answers that wait to be scored; more are counted as `busy`."""
KEPT_BYTES = 32 * 2**20
"""Of one answer, and of its request."""
WAITING_BYTES = 256 * 2**20
MODELS = 2
"""Weights that wait for their turn, each a whole model: where updates come faster than samples are scored, older ones go."""


class Scores(Protocol):
    """A model that holds the weights of one version."""

    def read(self, path: str) -> Mapping[str, Any]:
        """The weights of an update."""
        ...

    def switch(self, weights: Mapping[str, Any]) -> None:
        """To these weights."""
        ...

    def score(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Of each token."""
        ...


class Switch(NamedTuple):
    """From here on the engine has another version."""

    version: int
    weights: Mapping[str, Any] | None
    """None: nobody knows which."""
    keeps: bool = False
    """The same weights, under another number."""


class ShadowScorer:
    """One engine's. `offer` and `switch` never wait."""

    def __init__(
        self, reference: Scores, every: int, ask_facts: Callable[[], UpstreamFacts], mismatch: Mismatch
    ) -> None:
        """One answer in `every` is scored; `ask_facts` may take its time."""
        self.reference, self._every, self._ask_facts, self._mismatch = reference, every, ask_facts, mismatch
        self._queue: queue.SimpleQueue[Passed | Switch | None] = queue.SimpleQueue()
        self._answers = 0
        self._waiting = self._bytes = 0
        self._mutex = threading.Lock()
        self._version: int | None = 0
        """That the reference holds; None: another one's."""
        self._weights: dict[int, Mapping[str, Any]] = {}
        """That the reference is to take, by version."""
        self._facts: UpstreamFacts | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="zerodrift-shadow", daemon=True)
        self._thread.start()

    def chooses(self) -> bool:
        """Whether the answer that begins now is one in so many."""
        self._answers += 1
        return self._answers % self._every == 0

    def offer(self, passed: Passed) -> None:
        """One that was chosen, and has ended well."""
        size = len(passed.asked) + len(passed.answered)
        with self._mutex:
            fits = self._waiting < WAITING and self._bytes + size <= WAITING_BYTES
            if fits:
                self._waiting, self._bytes = self._waiting + 1, self._bytes + size
        if fits:
            self._queue.put(passed)
        else:
            self._mismatch.leave_out("busy")

    def switch(self, change: Switch) -> None:
        """Behind everything that was offered before."""
        with self._mutex:
            if change.weights is not None:
                self._weights[change.version] = change.weights
            while len(self._weights) > MODELS:
                del self._weights[min(self._weights)]
        self._queue.put(change._replace(weights=None))

    def close(self) -> None:
        """What waits is not scored any more."""
        self._stopping = True
        self._queue.put(None)
        self._thread.join(30)

    def _run(self) -> None:
        while (found := self._queue.get()) is not None and not self._stopping:
            if isinstance(found, Switch):
                self._switched(found)
                continue
            try:
                self._scored(found)
            except Unscored as error:
                self._mismatch.leave_out(str(error))
            except Exception:
                # A sample that cannot be scored must not be the last one that is.
                log.exception("a sample could not be scored")
                self._mismatch.leave_out("failed")
            finally:
                with self._mutex:
                    self._waiting -= 1
                    self._bytes -= len(found.asked) + len(found.answered)

    def _switched(self, change: Switch) -> None:
        self._facts = None
        if change.keeps:
            self._version = None if self._version is None else change.version
            return
        self._version = None
        self._mismatch.begin_version()
        with self._mutex:
            weights = self._weights.pop(change.version, None)
        if weights is not None:
            try:
                self.reference.switch(weights)
            except Exception:
                log.exception(
                    "the reference could not take version %d; its samples are not scored", change.version
                )
                return
            self._version = change.version

    def _scored(self, passed: Passed) -> None:
        if passed.version != self._version:
            raise Unscored("weights")
        if self._facts is None:
            try:
                self._facts = self._ask_facts()
            except ZerodriftError as error:
                raise Unscored("upstream") from error
        for sample in samples_of(passed, self._facts):
            try:
                self._mismatch.add(sample.logprobs, self.reference.score(sample.prompt, sample.tokens))
            except ZerodriftError as error:
                log.warning("a sample is not scored: %s", error)
                self._mismatch.leave_out("refused")

"""Which samples are held against the reference, and when: a thread of its own takes them one by one, in the order of events.

A change of weights stands in the same queue as samples do, so that whatever was made before it is scored before it.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from zerodrift.core.errors import ZerodriftError
from zerodrift.serve.shadow.chosen import ChosenCall, KeptCall, KeptRoom
from zerodrift.serve.shadow.figures import Mismatch
from zerodrift.serve.shadow.samples import Unscored, UpstreamFacts, samples_of

log = logging.getLogger("zerodrift.serve")
WAITING = 64
"""Answers that wait to be scored; more are counted as `busy`."""
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


Job = Callable[[int | None], None]
"""Called with the version that the reference holds; None: another one's."""


class _Offered(NamedTuple):
    kept: KeptCall
    version: int


class ShadowScorer:
    """One engine's. `offer` and `switch` never wait."""

    def __init__(
        self, reference: Scores, every: int, ask_facts: Callable[[], UpstreamFacts], mismatch: Mismatch
    ) -> None:
        """One answer in `every` is scored, 0: none; `ask_facts` may take its time."""
        self.reference, self._every, self._ask_facts, self._mismatch = reference, every, ask_facts, mismatch
        self._queue: queue.SimpleQueue[_Offered | Switch | Job | None] = queue.SimpleQueue()
        self._asked = self._waiting = 0
        self._room = KeptRoom()
        self._mutex = threading.Lock()
        self._version: int | None = 0
        """That the reference holds; None: another one's."""
        self._weights: dict[int, Mapping[str, Any]] = {}
        """That the reference is to take, by version."""
        self._facts: UpstreamFacts | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="zerodrift-shadow", daemon=True)
        self._thread.start()

    def choose(self, path: str, asked: bytes) -> ChosenCall | None:
        """The request that begins now, where it is one in so many."""
        self._asked += 1
        if not self._every or self._asked % self._every:
            return None
        if not self._room.take(len(asked)):
            self._mismatch.leave_out("busy")
            return None
        return ChosenCall(path, asked, self._room)

    def offer(self, chosen: ChosenCall, version: int, *, streamed: bool) -> None:
        """One whose answer has ended well, and was made by the weights of `version` alone."""
        if chosen.left_out is not None or not self._has_place():
            self._mismatch.leave_out(chosen.left_out or "busy")
            return
        self._queue.put(_Offered(chosen.hand_over(streamed=streamed), version))

    def _has_place(self) -> bool:
        with self._mutex:
            has = self._waiting < WAITING
            self._waiting += has
        return has

    def switch(self, change: Switch) -> None:
        """Behind everything that was offered before."""
        with self._mutex:
            if change.weights is not None:
                self._weights[change.version] = change.weights
            while len(self._weights) > MODELS:
                del self._weights[min(self._weights)]
        self._queue.put(change._replace(weights=None))

    def behind(self, job: Job) -> None:
        """To be called in this thread, behind everything that was offered and switched before."""
        self._queue.put(job)

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
            if not isinstance(found, _Offered):
                found(self._version)
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
                self._room.give_back(found.kept.size)
                with self._mutex:
                    self._waiting -= 1

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

    def _scored(self, offered: _Offered) -> None:
        if offered.version != self._version:
            raise Unscored("weights")
        if self._facts is None:
            try:
                self._facts = self._ask_facts()
            except ZerodriftError as error:
                raise Unscored("upstream") from error
        for sample in samples_of(offered.kept.passed, self._facts):
            try:
                self._mismatch.add(sample.logprobs, self.reference.score(sample.prompt, sample.tokens))
            except ZerodriftError as error:
                log.warning("a sample is not scored: %s", error)
                self._mismatch.leave_out("refused")

"""Did an engine keep its promises? A pure function over what happened, in its order. Torch-free.

I1  version truth    every token has the bits of the weights and the KV that it names
I2  atomic update    every step runs on the one version that is published, with the very digest that was committed
I3  no stale KV      KV of another version is looked back on only after a publication with `keep`, and then it is said
I4  compare-and-set  a publication follows the version that was current, and no two versions that serve have one label
I5  no silent loss   a request that was accepted ends once: complete, with an error, or aborted
I7  isolation        a request has the bits in company that it has alone
I8  bounded          nothing that is counted exceeds its cap
I9  discretion       no secret and no text of a prompt stands in a log

I6 is the trainer's: no poisoned batch reaches the optimiser after the breaker opened (`train/loop.py`).
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Something that happened."""


class Committed(Event, frozen=True, kw_only=True):
    """A version can be published from here on."""

    version: WeightVersion


class Dropped(Event, frozen=True, kw_only=True):
    """A committed version was aborted or forgotten."""

    label: str


class Published(Event, frozen=True, kw_only=True):
    """A version serves from the next step on."""

    version: WeightVersion
    follows: str | None
    """Label that was current before, as whoever published it said."""
    kv: str | None
    in_flight: tuple[str, ...] = ()
    """Requests that were under way."""


class Refused(Event, frozen=True, kw_only=True):
    """An update, or a message of one, was not taken."""

    code: str


class Restarted(Event, frozen=True, kw_only=True):
    """The process was killed and came back, with nothing in flight, on `version`."""

    version: WeightVersion


class Stepped(Event, frozen=True, kw_only=True):
    """A forward pass ran, over weights that measured `digest`."""

    version: WeightVersion
    digest: str | None
    """Of the tensors themselves, where somebody looked."""


class Ended(Event, frozen=True, kw_only=True):
    """A request came back."""

    request: str
    bits: tuple[tuple[int, str], ...]
    """Token and logprob, as hex, of every output token."""
    prompt_length: int
    versions: tuple[VersionSpan, ...]
    lineage: tuple[LineageSegment, ...]


class Recomputed(Event, frozen=True, kw_only=True):
    """A request that ended was computed again, from the versions that it names alone."""

    request: str
    bits: tuple[tuple[int, str], ...]


class Alone(Event, frozen=True, kw_only=True):
    """A request was served again with nobody beside it, under the versions that it had."""

    request: str
    bits: tuple[tuple[int, str], ...]


class Accepted(Event, frozen=True, kw_only=True):
    """A request was taken: from here on somebody waits for it."""

    request: str


class Finished(Event, frozen=True, kw_only=True):
    """A request ended, as the one who waited for it saw, or the server where nobody did any more."""

    request: str
    how: Literal["complete", "error", "aborted"]


class Private(Event, frozen=True, kw_only=True):
    """Something that nobody but its owner may read from here on."""

    what: str
    text: str


class Logged(Event, frozen=True, kw_only=True):
    """Something was written where operators read."""

    text: str


class Sized(Event, frozen=True, kw_only=True):
    """Something that must not grow without end."""

    what: str
    value: int
    cap: int


AnyEvent = (
    Committed
    | Dropped
    | Published
    | Refused
    | Restarted
    | Stepped
    | Ended
    | Recomputed
    | Alone
    | Accepted
    | Finished
    | Private
    | Logged
    | Sized
)


class Violation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A promise that was not kept."""

    invariant: str
    place: int
    """Which event showed it, from 0."""
    says: str


def violations(events: Iterable[AnyEvent]) -> list[Violation]:
    """Every promise that was broken, in the order in which it showed. The history is over: who still waits, waits for ever."""
    checker = _Checker()
    for place, event in enumerate(events):
        checker.take(place, event)
    checker.close()
    return checker.found


class _Checker:
    """What is known after each event."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._place = 0
        self._committed: dict[str, WeightVersion] = {}
        self._available: set[str] = set()
        self._served: set[str] = set()
        self._current: WeightVersion | None = None
        self._kept: dict[str, set[str]] = {}
        """Requests over which KV was kept, and labels whose KV that was."""
        self._ended: dict[str, Ended] = {}
        self._waiting: set[str] = set()
        self._finished: set[str] = set()
        self._secrets: list[Private] = []

    def take(self, place: int, event: AnyEvent) -> None:
        self._place = place
        getattr(self, f"_take_{type(event).__name__.lower()}")(event)

    def _break(self, invariant: str, says: str) -> None:
        self.found.append(Violation(invariant, self._place, says))

    def _take_committed(self, event: Committed) -> None:
        label = event.version.label
        if label in self._available or label in self._served:
            self._break("I4", f"{label!r} was committed twice")
        self._committed[label] = event.version
        self._available.add(label)

    def _take_dropped(self, event: Dropped) -> None:
        if self._current is not None and event.label == self._current.label:
            self._break("I2", f"{event.label!r} was dropped while it served")
        self._available.discard(event.label)

    def _take_published(self, event: Published) -> None:
        label, before = event.version.label, self._current
        if label not in self._available or self._committed[label] != event.version:
            self._break("I2", f"{label!r} was published and is not committed")
        if event.follows != (None if before is None else before.label):
            self._break("I4", f"{label!r} was published in place of {event.follows!r}, which was not current")
        if event.kv == "drain" and event.in_flight:
            self._break("I3", f"{label!r} was published by a drain with {event.in_flight[0]!r} in flight")
        if event.kv == "keep" and before is not None:
            for request in event.in_flight:
                self._kept.setdefault(request, set()).add(before.label)
        self._current = event.version
        self._served.add(label)

    def _take_refused(self, event: Refused) -> None:
        """What it must not change is seen by the steps that follow."""

    def _take_restarted(self, event: Restarted) -> None:
        if event.version != self._current:
            self._break(
                "I2", f"{event.version.label!r} serves after a restart, and was not the last published"
            )
        self._kept.clear()

    def _take_stepped(self, event: Stepped) -> None:
        if event.version != self._current:
            self._break("I2", f"a step ran on {event.version.label!r}, which is not published")
        if event.digest not in (None, event.version.digest):
            self._break("I2", f"a step ran on weights that are not those of {event.version.label!r}")

    def _take_ended(self, event: Ended) -> None:
        if event.request in self._ended:
            self._break("I1", f"{event.request!r} came back twice")
        self._ended[event.request] = event
        for span in event.versions:
            if self._committed.get(span.version.label) != span.version:
                self._break("I1", f"{event.request!r} has tokens of {span.version.label!r}, never committed")
        if sum(span.end - span.start for span in event.versions) != len(event.bits):
            self._break("I1", f"{event.request!r} has tokens without a version")
        self._check_kv(event)

    def _check_kv(self, event: Ended) -> None:
        """KV under the last token: of its own version, or kept and said so."""
        if not event.bits:
            return
        if sum(part.end - part.start for part in event.lineage) != event.prompt_length + len(event.bits) - 1:
            self._break("I3", f"{event.request!r} does not say which weights wrote its KV")
        own, allowed = event.versions[-1].version.label, self._kept.get(event.request, set())
        for part in event.lineage:
            if part.version.label != own and part.version.label not in allowed:
                self._break("I3", f"{event.request!r} looked back on KV of {part.version.label!r}")

    def _take_recomputed(self, event: Recomputed) -> None:
        self._compare("I1", event.request, event.bits, "by the weights that it names")

    def _take_alone(self, event: Alone) -> None:
        self._compare("I7", event.request, event.bits, "alone")

    def _compare(self, invariant: str, request: str, bits: tuple[tuple[int, str], ...], how: str) -> None:
        ended = self._ended.get(request)
        if ended is None:
            self._break(invariant, f"{request!r} was computed {how}, and never came back")
        elif ended.bits != bits:
            self._break(invariant, f"{request!r} has other bits {how}")

    def _take_accepted(self, event: Accepted) -> None:
        if event.request in self._waiting | self._finished:
            self._break("I5", f"{event.request!r} was accepted twice")
        self._waiting.add(event.request)

    def _take_finished(self, event: Finished) -> None:
        if event.request not in self._waiting:
            known = "ended twice" if event.request in self._finished else "ended, and was never accepted"
            self._break("I5", f"{event.request!r} {known}")
        self._waiting.discard(event.request)
        self._finished.add(event.request)

    def close(self) -> None:
        """Nothing more happens."""
        for request in sorted(self._waiting):
            self._break("I5", f"{request!r} was accepted, and never ended")

    def _take_private(self, event: Private) -> None:
        self._secrets.append(event)

    def _take_logged(self, event: Logged) -> None:
        for secret in self._secrets:
            if secret.text in event.text:
                self._break("I9", f"{secret.what} stands in the log")

    def _take_sized(self, event: Sized) -> None:
        if event.value > event.cap:
            self._break("I8", f"{event.what}: {event.value}, and at most {event.cap}")

"""Which weights does the engine have, as far as its calls have passed here, and which requests saw a change? Torch-free.

A version is a number: it grows with every call that may have changed a weight, also where the call failed or nobody knows.
A cache salt is made of it, so that keys and values of other weights are not found again, whoever forgot to reset the cache:

    before an update      one salt for all requests of the version
    while one goes on     a salt for each request: nobody can say which weights write its keys and values
    while paused          the same: it is run after the pause, and there may be an update before that
    after it              one salt for all again, a new one

The start of this process is part of it, so that a proxy that is started anew finds nothing of its predecessor's.
"""

import hashlib
import secrets
from dataclasses import dataclass, field


@dataclass(eq=False)
class RequestPassage:
    """One request that generates, from its arrival to the end of its answer."""

    first: int
    """Version at its arrival, or at the end of the pause that it arrived in."""
    last: int
    mixed: bool = False
    """It was there while weights may have changed."""
    waits: bool = False
    """It arrived in a pause: no token of it is made before that ends."""
    own_salt: str | None = None

    @property
    def is_mixed(self) -> bool:
        """Several weights may have made its tokens."""
        return self.mixed or self.last != self.first

    @property
    def told(self) -> str:
        """As the response header has it."""
        if self.last != self.first:
            return f"{self.first}-{self.last} mixed"
        return f"{self.first} mixed" if self.mixed else str(self.first)


@dataclass
class EngineVersions:
    """Of one engine. Only the event loop calls."""

    number: int = 0
    paused: bool = False
    changing: bool = False
    """From a call that may change weights until its end, or from start to finish of an update."""
    alive: set[RequestPassage] = field(default_factory=set)
    _origin: str = field(default_factory=lambda: secrets.token_hex(16))

    def enter(self) -> RequestPassage:
        """A request arrives."""
        uncertain = self.paused or self.changing
        passage = RequestPassage(
            self.number,
            self.number,
            mixed=self.changing and not self.paused,
            waits=self.paused,
            own_salt=secrets.token_hex(16) if uncertain else None,
        )
        self.alive.add(passage)
        return passage

    def leave(self, passage: RequestPassage) -> None:
        """Its answer has ended."""
        self.alive.discard(passage)

    def salt(self, passage: RequestPassage, own: str | None) -> str:
        """For vLLM: never equal for two versions, nor for two salts that clients chose; 64 characters, all of them letters and
        digits, because vLLM 0.32 takes 128 at most and refuses some."""
        told = (self._origin, str(passage.first), passage.own_salt or "", "" if own is None else f"={own}")
        return hashlib.sha256("\0".join(told).encode("utf-8", "surrogatepass")).hexdigest()

    def fresh_salt(self) -> str:
        """That no request has, nor will have."""
        own = secrets.token_hex(16)
        return self.salt(RequestPassage(self.number, self.number, own_salt=own), None)

    def begin(self) -> None:
        """From here on weights may change."""
        self.changing = True
        for passage in self.alive:
            passage.mixed |= not passage.waits

    def end(self, *, changed: bool) -> None:
        """They change no more; `changed` where they may have."""
        self.changing = False
        if changed:
            self.number += 1
            for passage in self.alive:
                passage.last = self.number
                if passage.waits:
                    passage.first = self.number

    def pause(self) -> None:
        """The engine has said that it makes no step."""
        self.paused = True

    def resume(self) -> None:
        """It goes on."""
        self.paused = False
        for passage in self.alive:
            passage.mixed |= passage.waits and self.changing
            passage.waits = False

    def lose(self) -> None:
        """The engine is gone: whatever answers next may have been started anew."""
        self.resume()
        self.begin()
        self.end(changed=True)

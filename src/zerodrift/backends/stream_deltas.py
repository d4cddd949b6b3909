"""How do the deltas of a stream become the answer that would have come whole?

What a trainer's client does is done here, and strictly: a delta that belongs to no sample, that comes after the end or
that takes back what was said is an error with its words, never skipped. What is lost between deltas stays lost, so
that whoever reads the joined answer finds it missing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from zerodrift.backends.http import Stream
from zerodrift.backends.json_path import look_up, put
from zerodrift.core.errors import BadAnswer, EngineUnreachable
from zerodrift.core.frozen import FrozenFacts


class Streaming(FrozenFacts, frozen=True, kw_only=True):
    """How one kind of server streams: as data. Paths as in json_path."""

    ask: Mapping[str, object] = {}
    """Fields beside those of a call that is answered whole."""
    samples: str = ""
    """A list of deltas in each event; "" where the event is the delta."""
    index: str | None = None
    """Which sample a delta belongs to; None where a call has one."""
    lists: tuple[str, ...]
    """Lists of a delta, one entry for each of its tokens, where they are in a whole sample as well."""
    text: str | None = None
    finish: str
    """Why a sample ended; absent or null in all its deltas but the last."""
    done: bool = True
    """The stream ends with [DONE]; otherwise with the sample."""
    cumulative: bool = False
    """Each delta holds everything so far."""


class Joined(NamedTuple):
    """An answer as if it had come whole."""

    answer: object
    deltas: int
    """Those that brought tokens, over all samples; 0 where it did come whole."""


@dataclass
class _Sample:
    """One sample while its deltas come."""

    whole: dict[str, Any] = field(default_factory=dict)
    """What is said once; where it is said again, the last counts."""
    lists: dict[str, list[Any]] = field(default_factory=dict)
    text: str = ""
    ended: bool = False
    deltas: int = 0

    def add(self, delta: Any, how: Streaming, where: str) -> None:
        self.whole |= {name: value for name, value in delta.items() if value is not None}
        grew = [self._grow(target, new, how, where) for target, new in _added(delta, how, where)]
        self.deltas += any(grew)
        if how.text is not None and isinstance(text := look_up(delta, how.text), str):
            self.text = text if how.cumulative else self.text + text
        self.ended = look_up(delta, how.finish) not in (msgspec.UNSET, None)

    def _grow(self, target: str, new: list[Any], how: Streaming, where: str) -> bool:
        known = self.lists.setdefault(target, [])
        if how.cumulative:
            if new[: len(known)] != known:
                raise BadAnswer(
                    f"{where} streams everything so far with each delta, and took back some of it ({target}): "
                    f"{len(known)} entries came before, and {len(new)} that do not begin with them"
                )
            new = new[len(known) :]
        known += new
        return bool(new)

    def joined(self, how: Streaming) -> dict[str, Any]:
        for target, values in self.lists.items():
            put(self.whole, target, values)
        if how.text is not None:
            put(self.whole, how.text, self.text)
        return self.whole


def has_tokens(stream: Stream, how: Streaming, where: str) -> bool:
    """Whether this server streams what is needed at all; whether it does so rightly is for a probe to say."""
    return any(
        new
        for document in stream.documents
        for delta in _deltas(document, how)
        for _, new in _added(delta, how, where)
    )


def join(stream: Stream, how: Streaming, where: str) -> Joined:
    """The answer that these deltas make."""
    if how.done and not stream.done:
        raise EngineUnreachable(
            f"{where} ended a stream without [DONE]; the server, or what is in front of it, broke off: see its log"
        )
    samples: dict[int, _Sample] = {}
    about: dict[str, Any] = {}
    for document in stream.documents:
        if how.samples:
            about |= {name: value for name, value in document.items() if value is not None}
        for delta in _deltas(document, how):
            index = 0 if how.index is None else look_up(delta, how.index)
            if type(index) is not int:
                raise BadAnswer(
                    f"{where} streamed a delta without {how.index!r}; nobody can say which sample it is of"
                )
            sample = samples.setdefault(index, _Sample())
            if sample.ended:
                raise BadAnswer(
                    f"{where} went on with sample {index} after it had ended; a delta came twice?"
                )
            sample.add(delta, how, where)
    _check_ended(samples, how, where)
    joined = [
        samples[index].joined(how) | ({} if how.index is None else {how.index: index})
        for index in sorted(samples)
    ]
    deltas = sum(sample.deltas for sample in samples.values())
    if not how.samples:
        return Joined(joined[0] if len(joined) == 1 else joined, deltas)
    put(about, how.samples, joined)
    return Joined(about, deltas)


def _check_ended(samples: Mapping[int, _Sample], how: Streaming, where: str) -> None:
    open_ended = [index for index, sample in samples.items() if not sample.ended]
    if samples and not open_ended:
        return
    of = f"sample {open_ended[0]}" if open_ended else "any sample"
    if how.done:
        raise BadAnswer(f"{where} ended a stream with [DONE] and never said why {of} ended ({how.finish})")
    raise EngineUnreachable(
        f"{where} ended a stream before {of} had ended; the server, or what is in front of it, broke off: see its log"
    )


def _deltas(document: Any, how: Streaming) -> Iterator[dict[str, Any]]:
    found = look_up(document, how.samples)
    for delta in found if isinstance(found, list) else [found]:
        if isinstance(delta, dict):
            yield delta


def _added(delta: Any, how: Streaming, where: str) -> Iterator[tuple[str, list[Any]]]:
    """What a delta adds to each list of its sample."""
    for path in how.lists:
        new = look_up(delta, path)
        if new not in (msgspec.UNSET, None):
            if not isinstance(new, list):
                raise BadAnswer(f"{where} streamed a delta with a strange {path!r}: {str(new)[:60]}")
            yield path, new

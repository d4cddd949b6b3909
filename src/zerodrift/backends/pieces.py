"""How do the pieces of a stream become the answer that would have come whole?

What a trainer's client does is done here, and strictly: a piece that belongs to no sample, that comes after the end or
that takes back what was said is an error with its words, never skipped. What is lost between pieces stays lost, so
that whoever reads the joined answer finds it missing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from zerodrift.backends.http import Stream
from zerodrift.backends.json_path import look_up, put
from zerodrift.core.errors import BadAnswer, EngineUnreachable
from zerodrift.core.frozen import freeze


class Streaming(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of server streams: facts, as in dialects. Paths as in json_path."""

    route: str | None = None
    """None: the one that answers whole."""
    ask: Mapping[str, object] = {}
    """Fields beside those of a call that is answered whole."""
    samples: str = ""
    """A list of pieces in each event; "" where the event is the piece."""
    index: str | None = None
    """Which sample a piece belongs to; None where a call has one."""
    lists: Mapping[str, str] = {}
    """Lists of a piece, one entry for each of its tokens, to where they are in a whole sample."""
    entries: Mapping[str, str] = {}
    """What a piece of one token says of it, to the list of a whole sample that it is one entry of."""
    text: str | None = None
    finish: str
    """Why a sample ended; absent or null in all its pieces but the last."""
    done: bool = True
    """The stream ends with [DONE]; otherwise with the sample."""
    cumulative: bool = False
    """Each piece holds everything so far."""
    differences: str | None = None
    """Where the server shows that pieces hold differences after all."""

    def __post_init__(self) -> None:
        """Facts stay as they were written."""
        freeze(self, "ask", "lists", "entries")


class Joined(NamedTuple):
    """An answer as if it had come whole."""

    answer: object
    pieces: int
    """That brought tokens, over all samples; 0 where it did come whole."""


@dataclass
class _Sample:
    """One sample while its pieces come."""

    whole: dict[str, Any] = field(default_factory=dict)
    """What is said once; where it is said again, the last counts."""
    lists: dict[str, list[Any]] = field(default_factory=dict)
    text: str = ""
    ended: bool = False
    pieces: int = 0

    def add(self, piece: Any, how: Streaming, where: str) -> None:
        self.whole |= {name: value for name, value in piece.items() if value is not None}
        grew = [self._grow(target, new, how, where) for target, new in _said(piece, how, where)]
        self.pieces += any(grew)
        if how.text is not None and isinstance(text := look_up(piece, how.text), str):
            self.text = text if how.cumulative else self.text + text
        self.ended = look_up(piece, how.finish) not in (msgspec.UNSET, None)

    def _grow(self, target: str, new: list[Any], how: Streaming, where: str) -> bool:
        known = self.lists.setdefault(target, [])
        if how.cumulative:
            if new[: len(known)] != known:
                raise BadAnswer(
                    f"{where} streams everything so far with each piece, and took back some of it ({target}): "
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
        for piece in _pieces(document, how)
        for _, new in _said(piece, how, where)
    )


def join(stream: Stream, how: Streaming, where: str) -> Joined:
    """The answer that these pieces make."""
    if how.done and not stream.done:
        raise EngineUnreachable(
            f"{where} ended a stream without [DONE]; the server, or what is in front of it, broke off: see its log"
        )
    samples: dict[int, _Sample] = {}
    about: dict[str, Any] = {}
    for document in stream.documents:
        if how.samples:
            about |= {name: value for name, value in document.items() if value is not None}
        for piece in _pieces(document, how):
            index = 0 if how.index is None else look_up(piece, how.index)
            if type(index) is not int:
                raise BadAnswer(
                    f"{where} streamed a piece without {how.index!r}; nobody can say which sample it is of"
                )
            sample = samples.setdefault(index, _Sample())
            if sample.ended:
                raise BadAnswer(
                    f"{where} went on with sample {index} after it had ended; a piece came twice?"
                )
            sample.add(piece, how, where)
    _check_ended(samples, how, where)
    joined = [samples[index].joined(how) | _numbered(index, how) for index in sorted(samples)]
    pieces = sum(sample.pieces for sample in samples.values())
    if not how.samples:
        return Joined(joined[0] if len(joined) == 1 else joined, pieces)
    put(about, how.samples, joined)
    return Joined(about, pieces)


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


def _numbered(index: int, how: Streaming) -> dict[str, int]:
    return {} if how.index is None else {how.index: index}


def _pieces(document: Any, how: Streaming) -> Iterator[dict[str, Any]]:
    found = look_up(document, how.samples)
    for piece in found if isinstance(found, list) else [found]:
        if isinstance(piece, dict):
            yield piece


def _said(piece: Any, how: Streaming, where: str) -> Iterator[tuple[str, list[Any]]]:
    """What a piece adds to each list of its sample."""
    for source, target in how.lists.items():
        new = look_up(piece, source)
        if new not in (msgspec.UNSET, None):
            if not isinstance(new, list):
                raise BadAnswer(f"{where} streamed a piece with a strange {source!r}: {str(new)[:60]}")
            yield target, new
    for source, target in how.entries.items():
        if (entry := look_up(piece, source)) not in (msgspec.UNSET, None):
            yield target, [entry]

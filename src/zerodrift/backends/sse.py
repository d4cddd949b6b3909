"""What did a stream of server-sent events say? As the WHATWG standard reads it, except that a cut-off event is told.

Lines end in LF, CR or CRLF and in nothing else: `str.splitlines` would also cut at U+2028, which JSON leaves as it is.
"""

import re
from typing import NamedTuple

MEDIA = "text/event-stream"
DONE = "[DONE]"
"""How OpenAI's format ends a stream; no part of the standard."""

_LINE_END = re.compile("\r\n|\n|\r")


class Events(NamedTuple):
    """The data of each event, in order."""

    data: list[str]
    cut_off: bool
    """The last event has no empty line behind it: more was to come."""


def read(body: bytes) -> Events:
    """All events of a stream; comments, and fields other than data, say nothing here."""
    # A character that is not whole is replaced, as the standard has it: ids and numbers are ASCII.
    text = body.decode(errors="replace").removeprefix("\ufeff")
    events: list[str] = []
    pending: list[str] = []
    *lines, rest = _LINE_END.split(text)
    for line in lines:
        field, _, value = line.partition(":")
        if field == "data":
            pending.append(value.removeprefix(" "))
        elif not line and pending:
            events.append("\n".join(pending))
            pending = []
    return Events(events, cut_off=bool(pending) or not (rest == "" or rest.startswith(":")))

"""A generation request with the salt of its version, and nothing else of it touched. Torch-free.

Only the outermost object is taken apart: what stands in it stays the bytes that were sent.
"""

from collections.abc import Callable

import msgspec

from zerodrift.serve.errors import CallRefused
from zerodrift.serve.limits import MOST_CHARACTERS

NAME = "cache_salt"
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def salted(content: bytes, salt_of: Callable[[str | None], str]) -> bytes:
    """`content` with the salt that `salt_of` makes of the client's own.

    What cannot be read is refused and not passed on: an engine that can read it would take it without a salt.
    """
    try:
        fields = _FIELDS.decode(content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CallRefused(
            400, f"the body is no JSON object that can be read: {str(error)[:300]}", code="body/invalid"
        ) from error
    fields[NAME] = msgspec.Raw(msgspec.json.encode(salt_of(_own(fields.get(NAME)))))
    return msgspec.json.encode(fields)


def _own(sent: msgspec.Raw | None) -> str | None:
    if sent is None:
        return None
    try:
        own = msgspec.json.decode(sent, type=str | None)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        own = ""
    if own is not None and not 1 <= len(own) <= MOST_CHARACTERS:
        raise CallRefused(
            400,
            f"{NAME} is a string of 1 to {MOST_CHARACTERS} characters",
            code="parameter/invalid",
            param=NAME,
        )
    return own

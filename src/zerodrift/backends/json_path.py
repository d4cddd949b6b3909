"""Where in a JSON document is a value? Paths are data: `timings/cache_n`, or `probabilities/*/id` for every element.

Keys are joined by slashes, because servers put dots into names; a number is an index; `*` gives a list with what
each element holds. The empty path is the document itself.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

EACH = "*"


def look_up(document: object, path: str) -> Any:
    """The value at `path`; UNSET where it, or that of any element, is not there."""
    key, _, rest = path.partition("/")
    if not key:
        return document
    if key == EACH:
        if not isinstance(document, list):
            return UNSET
        found = [look_up(element, rest) for element in document]
        return UNSET if any(value is UNSET for value in found) else found
    if isinstance(document, Mapping) and key in document:
        return look_up(document[key], rest)
    if isinstance(document, list) and key.isdecimal() and int(key) < len(document):
        return look_up(document[int(key)], rest)
    return UNSET


def put(document: dict[str, Any], path: str, value: object) -> None:
    """Write `value` at `path`, through objects that are made where they are not there."""
    *folders, name = path.split("/")
    for folder in folders:
        document = document.setdefault(folder, {})
    document[name] = value

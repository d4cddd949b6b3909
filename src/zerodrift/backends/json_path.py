"""Where in a JSON document is a value? Paths are data: `timings/cache_n`, or `probabilities/*/id` for every element.

Keys are joined by slashes, because servers put dots into names; a number is an index; `*` gives a list with what
each element holds. The empty path is the document itself.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
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


def facts_at(document: object, paths: Mapping[str, str]) -> dict[str, str]:
    """Facts that a server shows, by name; one that it does not is left out: two releases then differ in it."""
    found = {name: look_up(document, path) for name, path in paths.items()}
    return {name: as_fact(value) for name, value in found.items() if value is not UNSET}


def as_fact(value: object) -> str:
    """As fingerprints have it; a dtype without the library that it belongs to."""
    if isinstance(value, str):
        return value.removeprefix("torch.")
    return msgspec.json.encode(value, order="sorted").decode()

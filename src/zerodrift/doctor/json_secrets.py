"""Secrets inside the JSON that a flag, a variable or a line takes, as in `{"token": …}`, at any depth."""

import json
import re
from collections.abc import Sequence
from typing import Any

from zerodrift.doctor.secrets import HIDDEN, names_a_secret

_BODY = re.compile(r"((?:-*[\w.-]+=)*)(\s*[\[{].*)", re.DOTALL)
"""What may be a JSON, behind a flag or a variable that shares its word."""
_KEY = re.compile(r"([\w.-]+)\\?[\"']?\s*[:=]")
_COUNTED = ("id", "ids", "index")


def inside(text: str) -> list[str]:
    """The secrets in it; all of it where it is no JSON and names one; none in what does not begin like one."""
    body = _BODY.fullmatch(text)
    if body is None:
        return []
    try:
        return held(_parsed(body[2]))
    except (ValueError, RecursionError):
        return [text] if any(names_a_secret(name) for name in _KEY.findall(body[2])) else []


def held(value: Any, *, below: bool = False) -> list[str]:
    """The secrets in what a JSON says; `below` is under a key that names one."""
    if isinstance(value, dict):
        return [
            each for key, inner in value.items() for each in held(inner, below=below or _names(key, inner))
        ]
    if isinstance(value, list):
        return [each for inner in value for each in held(inner, below=below)]
    if isinstance(value, str) and not below:
        return inside(value)
    return [str(value)] if below and not _says_nothing(value) else []


def masked(text: str) -> str:
    """The same JSON without them; none of it where it cannot be taken apart."""
    body = _BODY.fullmatch(text)
    if body is None:
        return HIDDEN
    try:
        return body[1] + json.dumps(without(_parsed(body[2])), ensure_ascii=False)
    except (ValueError, RecursionError):
        return body[1] + HIDDEN


def without(value: Any, *, below: bool = False) -> Any:
    """What a JSON says, with its secrets taken out."""
    if isinstance(value, dict):
        return {key: without(inner, below=below or _names(key, inner)) for key, inner in value.items()}
    if isinstance(value, list):
        return [without(inner, below=below) for inner in value]
    if isinstance(value, str) and not below:
        return masked(value) if inside(value) else value
    return HIDDEN if below and not _says_nothing(value) else value


def _parsed(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key given twice the first would go unseen."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _names(key: str, value: Any) -> bool:
    """Whether it is a secret: `eos_token_id` counts tokens, and holds numbers."""
    numbers = value if isinstance(value, list) else [value]
    counted = re.split(r"[-_.]+", key.lower())[-1] in _COUNTED
    return names_a_secret(key) and not (counted and all(isinstance(each, int) for each in numbers))


def _says_nothing(value: Any) -> bool:
    return value is None or value == "" or isinstance(value, bool)

"""What may not be shown? The value of whatever names a secret: a flag, a key, a variable. In doubt it is left out."""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from zerodrift.core.secrets import flag_of_a_secret, names_a_secret

HIDDEN = "(not shown)"
VALUE = f"'{HIDDEN}'"
"""In a command, where it has to be one word."""
# Well-known shapes, a password in an address, and escapes, which may spell a name.
_SHAPES = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[a-z]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w.-]+)|://[^\s/@]+@|\\u"
)
_ASSIGNED = re.compile(r"([A-Za-z_][\w.-]*)[\"'\\]*\s*[:=]|--?([A-Za-z][\w.-]*)\s+\S|\b(bearer)\s", re.I)


def may_hold_one(text: str) -> bool:
    """Whether a value may, whatever it is called: by its shape, or by a name in it."""
    named = [name for found in _ASSIGNED.findall(text) for name in found if name]
    return _SHAPES.search(text) is not None or any(map(names_a_secret, named))


def safe(text: str) -> str:
    """A value as it may be printed."""
    return HIDDEN if may_hold_one(text) else text


def hidden(words: Sequence[str]) -> list[str | None]:
    """For each word of a command what is shown in its place; None where it may stay.

    A value goes on to the next flag, for quotes may be missing, and its first word may look like a flag.
    """
    found: list[str | None] = []
    hiding = owed = False
    for word in words:
        name, equals, value = word.partition("=")
        named = flag_of_a_secret(name)
        if word.startswith("-") and not owed:
            hiding, owed = named or may_hold_one(value), named and not equals
            found.append(f"{name}={VALUE}" if hiding and equals else None)
        elif equals and not hiding and not owed:  # a variable
            found.append(f"{name}={VALUE}" if named or may_hold_one(value) else None)
        else:
            hiding, owed = hiding or owed or may_hold_one(word), word.startswith("-") and named
            found.append(VALUE if hiding else None)
    return found


def hide(tree: Any) -> None:
    """Take them out of a YAML tree, in place."""
    _hide(tree, {each for each in _named(tree, below=False) if isinstance(each, str)}, below=False)


def hide_comments(text: str) -> str:
    """A text without the comments that may hold one."""
    return re.sub(
        r"(?m)(?<!\S)#.*$", lambda found: f"# {HIDDEN}" if may_hold_one(found[0]) else found[0], text
    )


def _places(tree: Any) -> list[tuple[Any, Any, bool]]:
    """Where each value stands, and whether under a name."""
    if isinstance(tree, dict):
        return [(key, value, names_a_secret(str(key))) for key, value in tree.items()]
    masks = hidden([each if isinstance(each, str) else "" for each in tree])
    return [(index, value, masks[index] is not None) for index, value in enumerate(tree)]


def _named(tree: Any, *, below: bool) -> Iterator[object]:
    """Every value under a name: an anchor may carry it to where no name tells."""
    if not isinstance(tree, dict | list):
        yield from [tree] if below else []
        return
    for _, value, named in _places(tree):
        yield from _named(value, below=below or named)


def _hide(tree: Any, secrets: Collection[str], *, below: bool) -> None:
    for place, value, named in _places(tree):
        if isinstance(value, dict | list):
            _hide(value, secrets, below=below or named)
        elif value in (None, "") or isinstance(value, bool):  # says nothing
            continue
        elif below or named or (isinstance(value, str) and (value in secrets or may_hold_one(value))):
            tree[place] = HIDDEN

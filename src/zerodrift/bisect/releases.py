"""Which releases of an engine are there, oldest first? As pip tells them, whichever index it is configured with."""

import re
from collections.abc import Sequence

from zerodrift.core.errors import ConfigError, InstallFailed

_NUMBER = re.compile(r"(\d+(?:\.\d+)*)(?:\.post(\d+))?")
"""A release or a new build of one. Candidates (rc) and builds of a day (dev) are no releases."""
_TOLD = re.compile(r"^Available versions: (.+)$", re.MULTILINE)


def read_listed(text: str, package: str) -> list[str]:
    """Releases in what `pip index versions` printed, oldest first."""
    told = _TOLD.search(text)
    if told is None:
        raise InstallFailed(
            f"pip names no release of {package}; is an index that has it configured? It said: {text.strip() or 'nothing'}"
        )
    names = [name.strip() for name in told[1].split(",")]
    return sorted((name for name in names if _NUMBER.fullmatch(name)), key=order)


def order(release: str) -> tuple[tuple[int, ...], int]:
    """By what releases are ordered: numbers, then new builds of the same."""
    match = _NUMBER.fullmatch(release)
    if match is None:
        raise ConfigError(f"{release!r} is not the number of a release, as 0.18.1 and 0.9.0.post2 are")
    return tuple(map(int, match[1].split("."))), int(match[2] or -1)


def between(listed: Sequence[str], first: str, last: str, package: str) -> list[str]:
    """From `first` to `last`, both included."""
    if order(first) >= order(last):
        raise ConfigError(
            f"{first} does not come before {last}; give the older release first, and another than the newer"
        )
    for end in (first, last):
        if end not in listed:
            near = min(listed, key=lambda each: _apart(each, end))
            raise ConfigError(f"there is no {package} {end}; the nearest release is {near}")
    return [each for each in listed if order(first) <= order(each) <= order(last)]


def _apart(one: str, other: str) -> list[int]:
    left, right = order(one)[0], order(other)[0]
    length = max(len(left), len(right))
    return [abs(a - b) for a, b in zip(_filled(left, length), _filled(right, length), strict=True)]


def _filled(numbers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (*numbers, *[0] * (length - len(numbers)))

"""Labels that `observe` is given of its sequences, by kind: which replica, which environment, which prompt."""

from collections.abc import Mapping
from typing import Any

from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.host import host
from zerodrift.stats.arrays import Ids

UNIT = "prompt"
"""The kind of group that is no cell, but says which sequences are not independent."""
RESERVED = frozenset({"all", "log p", "position", "length", "lag"})
"""Kinds that every batch has by itself."""
MOST_LABELS = 64
"""Of one kind, at a time. Memory is constant, and an id per sequence is no group."""
MOST_BYTES = 256
"""Of a label: it names something, in messages and in every state that is written."""


def labels_of(groups: Any, rows: int, kept: Ids) -> dict[str, tuple[str, ...]]:
    """Of sequences that have tokens, in their order."""
    if not isinstance(groups, Mapping | None):
        raise InvalidValue(f"groups is a {type(groups).__name__}; give labels by kind, one per sequence")
    labels = {}
    for kind, values in (groups or {}).items():
        _check_kind(str(kind))
        listed = values if isinstance(values, (list, tuple)) else host(kind, values).tolist()
        texts = [str(value) for value in listed] if isinstance(listed, (list, tuple)) else []
        if len(texts) != rows:
            raise InvalidValue(
                f"groups[{kind!r}] has {len(texts)} labels for {rows} sequences; give one per sequence"
            )
        _check_texts(str(kind), texts)
        labels[str(kind)] = tuple(texts[place] for place in kept)
        check_count(str(kind), len(set(labels[str(kind)])))
    return labels


def check_count(kind: str, labels: int) -> None:
    """So many of a kind in one batch, of all ranks together."""
    if labels > MOST_LABELS and kind != UNIT and kind not in RESERVED:
        raise InvalidValue(
            f"{kind} has {labels} labels in one batch; at most {MOST_LABELS} can be watched one by one"
        )


def _check_kind(kind: str) -> None:
    if kind in RESERVED:
        raise InvalidValue(
            f"groups has a kind {kind!r}, which the monitor fills in itself; name yours otherwise"
        )
    if not kind or "=" in kind:
        raise InvalidValue(f"groups has a kind {kind!r}; reasons say kind=label, so it has a name, without =")


def _check_texts(kind: str, texts: list[str]) -> None:
    """A label goes into a file and to the other ranks."""
    for text in texts:
        try:
            short = len(text.encode()) <= MOST_BYTES
        except UnicodeEncodeError:
            short = False
        if not short:
            raise InvalidValue(
                f"groups[{kind!r}] has a label {text[:40]!a}; a label is text of at most {MOST_BYTES} bytes"
            )

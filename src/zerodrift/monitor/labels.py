"""Which labels are remembered: of each kind as many as can be watched one by one. Replicas are named by their pods, and pods come
and go; so those that were not seen for longest make room, and one that comes back later starts anew."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from zerodrift.core.frozen import freeze
from zerodrift.monitor.decision import Code, Gap, Reason
from zerodrift.monitor.groups import MOST_LABELS, RESERVED, check_count


class Labels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is remembered of them, by number of batches observed."""

    seen: Mapping[str, int] = {}
    """When each was last in a batch."""
    told: Mapping[str, int] = {}
    """When of a kind it was last said that it has too many."""

    def __post_init__(self) -> None:
        """What was remembered stays."""
        freeze(self, "seen", "told")


class Room(NamedTuple):
    """Who had to go for the labels of a batch."""

    labels: Labels
    gone: frozenset[str]
    reasons: tuple[Reason, ...]


def kind_of(key: str) -> str:
    """Of `replica=3`."""
    return key.partition("=")[0]


def check_batch(keys: Iterable[str]) -> None:
    """In one batch of all ranks together."""
    for kind, labels in Counter(map(kind_of, keys)).items():
        check_count(kind, labels)


def room_for(labels: Labels, known: Iterable[str], batch: Iterable[str], now: int, interval: int) -> Room:
    """`known`: whoever something is remembered of; `batch`: no more of a kind than there is room for."""
    seen = {**dict.fromkeys(known, -1), **labels.seen, **dict.fromkeys(batch, now)}
    seen = {key: at for key, at in seen.items() if kind_of(key) not in RESERVED}
    gone, told, reasons = set[str](), dict(labels.told), list[Reason]()
    for kind, count in Counter(map(kind_of, seen)).items():
        oldest = sorted((at, key) for key, at in seen.items() if kind_of(key) == kind)
        leaving = oldest[: max(0, count - MOST_LABELS)]
        gone |= {key for _, key in leaving}
        alive = bool(leaving) and leaving[-1][0] > max(-1, now - interval)
        if alive and now - told.get(kind, -interval) >= interval:
            told[kind] = now
            reasons.append(_too_many(kind, interval))
    kept = {key: at for key, at in seen.items() if key not in gone}
    return Room(Labels(seen=kept, told=told), frozenset(gone), tuple(reasons))


def _too_many(kind: str, interval: int) -> Reason:
    message = (
        f"{kind} has had more than {MOST_LABELS} labels in {interval} batches, and no more can be watched one by one: those not seen for "
        "longest are forgotten, and judged with the whole alone until they have been learned anew; give coarser labels"
    )
    return Reason(code=Code.NOT_OBSERVED, gap=Gap.MISMATCH, where=kind, message=message, warning=True)

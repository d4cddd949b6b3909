"""Receipts on the disk, and who may be trained on by them. Torch-free.

`receipts.jsonl` has a line for each, flushed before anybody hears of it. What a line says is believed where it was sealed
with the key, and where it follows the line before: a line that was taken out is missed, unless it was the last. An engine whose last receipt is not CONFIRMED gives no rollouts, and rollouts of a version whose last receipt
says otherwise are refused, whatever they carry.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import msgspec
from filelock import FileLock

from zerodrift.core.completion import Completion
from zerodrift.core.errors import InvalidValue, NoReceipt, RecordError
from zerodrift.core.version import WeightVersion
from zerodrift.records.archive.room import room_for
from zerodrift.records.codec import LineWriter, drop_torn_line
from zerodrift.sync.judge import Arrival
from zerodrift.sync.key import NBYTES
from zerodrift.sync.receipt import (
    Receipt,
    ReceiptedRollout,
    SealedReceipt,
    decode_receipt,
    opened,
    require_stamped,
    seal,
    stamped,
)

LOG, LOCK = "receipts.jsonl", ".receipts.lock"
MOST_LINE_BYTES = 2**20
"""A receipt has 2 KB."""
Place = tuple[str, int | None]
"""Replica and rank."""


class ReceiptLedger:
    """Every receipt of one training run, for any number of threads and processes: each sees what the others wrote."""

    def __init__(self, directory: Path, key: bytes) -> None:
        """What is there is read and checked; `key` as `read_key` gives it."""
        if not isinstance(key, bytes) or len(key) != NBYTES:
            raise InvalidValue(
                f"a receipt key is {NBYTES} bytes; make one with `zerodrift sync key` and read it by read_key"
            )
        self._path, self._key = Path(directory) / LOG, key
        self._by_id: dict[str, Receipt] = {}
        self._at: dict[Place, list[Receipt]] = {}
        self._tail: str | None = None
        """Id of the last line."""
        self._read_bytes = 0
        """Of the file; what comes after them is new."""
        self._mutex = threading.RLock()
        self._read()

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """In the order in which they were taken."""
        with self._fresh():
            return tuple(self._by_id.values())

    def append(self, receipt: Receipt) -> SealedReceipt:
        """On the disk when this returns, and said to follow the line before."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._mutex, FileLock(self._path.with_name(LOCK)):
            self._read()
            if self._path.exists():
                drop_torn_line(self._path)
            sealed = seal(msgspec.structs.replace(receipt, follows=self._tail), self._key)
            with room_for(self._path), LineWriter[SealedReceipt](self._path) as writer:
                writer.write(sealed)
            self._read()
        return sealed

    def last(self, place: Place) -> Receipt | None:
        """Of one rank of one replica."""
        with self._fresh():
            return self._at[place][-1] if place in self._at else None

    def since_confirmed(self, place: Place) -> list[Receipt]:
        """Those of `place` behind its last CONFIRMED one, the latest first."""
        with self._fresh():
            theirs = reversed(self._at.get(place, []))
            return list(takewhile(lambda each: each.arrival is not Arrival.CONFIRMED, theirs))

    @property
    def places(self) -> tuple[Place, ...]:
        """All that ever had a receipt."""
        with self._fresh():
            return tuple(self._at)

    def vouched(self, version: WeightVersion, replica: str) -> str:
        """Id of the receipt that vouches for `version` on every rank of `replica` that ever had one: it has it now or had it."""
        with self._fresh():
            return self._vouched(version, replica).id

    def _vouched(self, version: WeightVersion, replica: str) -> Receipt:
        found = None
        for (_, rank), theirs in self._places(replica):
            of_version = [each for each in theirs if _same(each.version, version)]
            if not of_version:
                of_rank = "" if rank is None else f"rank {rank} of "
                raise NoReceipt(
                    f"{of_rank}replica {replica!r} has no receipt of {version.label!r}; take one before it generates"
                )
            found = _vouching(of_version)
        if found is None:
            raise NoReceipt(f"replica {replica!r} has no receipt at all; take one before it generates")
        return found

    def _places(self, replica: str) -> list[tuple[Place, list[Receipt]]]:
        """What is known of every rank of a replica."""
        return [(place, theirs) for place, theirs in self._at.items() if place[0] == replica]

    def stamp(self, completions: Iterable[Completion], replica: str) -> list[ReceiptedRollout]:
        """Rollouts of `replica`, each with the receipts of its versions; refused while its last one is not CONFIRMED.

        Stamp where rollouts are made, before the next update is sent: a label alone does not tell what was made while weights
        changed from what was made before. Of the exact engine hand in outputs as they are: `completion()` leaves out `past` and `lora`.
        """
        completions = list(completions)  # whatever it takes to make them
        with self._fresh():
            of_replica = [theirs for _, theirs in self._places(replica)]
            for theirs in of_replica:
                _require_confirmed(theirs[-1])
            return [self._stamped(each, replica, of_replica) for each in completions]

    def _stamped(
        self, completion: Completion, replica: str, of_replica: list[list[Receipt]]
    ) -> ReceiptedRollout:
        versions = completion.made_by
        for version in versions:
            for theirs in of_replica:
                _require_last(version, theirs)
        # That there are no tokens was said by some weights as well: the last.
        versions = versions or tuple(theirs[-1].version for theirs in of_replica)
        receipts = tuple(dict.fromkeys(self._vouched(version, replica).id for version in versions))
        return stamped(completion.completion(), receipts, replica, self._key)

    @contextmanager
    def _fresh(self) -> Iterator[None]:
        """With all that others have written, and nothing of what threads here write meanwhile."""
        with self._mutex:
            self._read()
            yield

    def _read(self) -> None:
        """What is new since the last time."""
        with self._mutex:
            if not self._path.exists():
                self._require_size(0)
                return
            if not self._path.is_file():
                raise RecordError(f"{self._path} is no plain file; it should hold the lines of a ledger")
            with self._path.open("rb") as file:
                self._require_size(file.seek(0, os.SEEK_END))
                file.seek(self._read_bytes)
                for line in iter(lambda: file.readline(MOST_LINE_BYTES), b""):
                    if len(line) == MOST_LINE_BYTES:
                        raise RecordError(
                            f"{self._path} has a line of {MOST_LINE_BYTES} bytes or more; no receipt has"
                        )
                    if not line.endswith(b"\n"):
                        break  # a kill cut it off, or it is being written: nobody heard of it
                    self._take(line)
                    self._read_bytes += len(line)

    def _require_size(self, size: int) -> None:
        if size < self._read_bytes:
            raise RecordError(
                f"{self._path} had {self._read_bytes} bytes and has {size}; receipts were taken out: put the file back as it was"
            )

    def _take(self, line: bytes) -> None:
        where = f"{self._path.name}, line {len(self._by_id) + 1}"
        sealed = decode_receipt(line, where)
        try:
            receipt = opened(sealed, self._key)
        except NoReceipt as error:
            raise NoReceipt(f"{where}: {error}") from error
        if sealed.id in self._by_id:
            raise RecordError(f"{where} is a receipt that stands above; put the file back as it was")
        if receipt.follows != self._tail:
            raise RecordError(
                f"{where} follows the receipt {receipt.follows}, and the one above it is {self._tail}; lines were taken out or exchanged: put the file back as it was"
            )
        self._by_id[sealed.id], self._tail = receipt, sealed.id
        self._at.setdefault(receipt.place, []).append(receipt)

    def require(self, rollouts: Iterable[ReceiptedRollout]) -> list[Completion]:
        """See `require_receipt`."""
        rollouts = list(rollouts)  # whatever it takes to make them
        with self._fresh():
            return [self._required(rollout) for rollout in rollouts]

    def _required(self, rollout: ReceiptedRollout) -> Completion:
        named = [self._named(each) for each in rollout.receipts]
        versions = rollout.completion.made_by
        if not named and not versions:
            raise NoReceipt("a rollout without tokens carries no receipt either; stamp it where it is made")
        # Of KV that was written anew since nothing but the receipts tells.
        others = [each.version for each in named if not any(_same(each.version, made) for made in versions)]
        for version in (*versions, *others):
            theirs = [each for each in named if _same(each.version, version)]
            if not theirs:
                raise NoReceipt(
                    f"a rollout of {version.label!r} carries no receipt of it; generate it by an engine that has one"
                )
            for each in theirs:
                self._vouched(version, each.replica)
        require_stamped(rollout, self._key)
        return rollout.completion

    def _named(self, name: str) -> Receipt:
        if (found := self._by_id.get(name)) is None:
            raise NoReceipt(
                f"a rollout carries the receipt {name}, which is not in {self._path}; it was never taken here"
            )
        return found


def require_receipt(rollouts: Iterable[ReceiptedRollout], ledger: ReceiptLedger) -> list[Completion]:
    """What may be trained on: every token was made by weights that its engine was measured to have, or none is let in."""
    return ledger.require(rollouts)


def _require_confirmed(receipt: Receipt) -> None:
    if receipt.arrival is not Arrival.CONFIRMED:
        raise NoReceipt(
            f"{receipt.version.label!r} on replica {receipt.replica!r} is {receipt.arrival}: {receipt.message}; "
            "no rollout is accepted until a receipt is confirmed"
        )


def _require_last(version: WeightVersion, theirs: list[Receipt]) -> None:
    """Where an engine shows no digest: nothing else was sent to this rank since the label first came."""
    labels = [each.version.label for each in theirs]
    if version.digest is None and version.label in labels[:-1]:
        since = labels[labels.index(version.label) :]
        if other := next((label for label in since if label != version.label), None):
            raise NoReceipt(
                f"{other!r} was sent to replica {theirs[-1].replica!r} since {version.label!r} came, and a rollout of "
                f"{version.label!r} may be of weights between them: stamp rollouts where they are made, before the next update, "
                "and send each under a label of its own"
            )


def _vouching(theirs: list[Receipt]) -> Receipt:
    """The last of those of one version on one rank. Whoever sends it again does so under another label: rollouts made before
    could not be told from those made after."""
    _require_confirmed(last := theirs[-1])
    # What was said when it was sent is the first word; said once more, it was sent once more.
    for each in theirs[1:] if theirs[0].is_hold else theirs:
        if each.arrival is not Arrival.CONFIRMED:
            found = "sent twice" if each.is_hold else str(each.arrival)
            raise NoReceipt(
                f"{last.version.label!r} on replica {last.replica!r} was {found} before it was confirmed, and what was made before "
                "cannot be told from what was made after; send it under another label"
            )
    return last


def _same(receipt: WeightVersion, rollout: WeightVersion) -> bool:
    """A rollout may come with a label alone: servers show no digest."""
    return receipt.label == rollout.label and rollout.digest in (None, receipt.digest)

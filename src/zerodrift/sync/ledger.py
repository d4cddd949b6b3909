"""Receipts on the disk, and who may be trained on by them. Torch-free.

`receipts.jsonl` has a line for each, flushed before anybody hears of it. What a line says is believed where it was sealed
with the key. An engine whose last receipt is not CONFIRMED gives no rollouts, and rollouts of a version whose last receipt
says otherwise are refused, whatever they carry.
"""

from collections.abc import Iterable
from pathlib import Path

from zerodrift.core.completion import Completion
from zerodrift.core.errors import NoReceipt, RecordError
from zerodrift.core.version import WeightVersion
from zerodrift.records.archive.room import room_for
from zerodrift.records.codec import LineWriter, drop_torn_line, numbered_lines
from zerodrift.sync.judge import Arrival
from zerodrift.sync.receipt import Receipt, ReceiptedRollout, SealedReceipt, decode_receipt, opened, seal

LOG = "receipts.jsonl"
Place = tuple[str, int | None]
"""Replica and rank."""


class ReceiptLedger:
    """Every receipt of one training run. One process writes; any may read."""

    def __init__(self, directory: Path, key: bytes) -> None:
        """What is there is read and checked; `key` as `read_key` gives it."""
        self._path, self._key = Path(directory) / LOG, key
        self._by_id: dict[str, Receipt] = {}
        self._last: dict[Place, str] = {}
        if self._path.exists():
            self._read()

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """In the order in which they were taken."""
        return tuple(self._by_id.values())

    def append(self, receipt: Receipt) -> SealedReceipt:
        """On the disk when this returns."""
        sealed = seal(receipt, self._key)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            drop_torn_line(self._path)
        with room_for(self._path), LineWriter[SealedReceipt](self._path) as writer:
            writer.write(sealed)
        self._take(sealed.id, receipt)
        return sealed

    def last(self, place: Place) -> Receipt | None:
        """Of one rank of one replica."""
        found = self._last.get(place)
        return None if found is None else self._by_id[found]

    @property
    def places(self) -> tuple[Place, ...]:
        """All that ever had a receipt."""
        return tuple(self._last)

    def vouched(self, version: WeightVersion, replica: str) -> str:
        """Id of the receipt that vouches for `version` on every rank of `replica`, which has it now or had it."""
        of_replica = [each for each in self._by_id.values() if each.replica == replica]
        of_version = {each.place: each for each in of_replica if _same(each.version, version)}
        if not of_version:
            raise NoReceipt(
                f"replica {replica!r} has no receipt of {version.label!r}; take one before it generates"
            )
        for each in of_version.values():
            _require_confirmed(each)
        return list(of_version.values())[-1].id

    def stamp(self, completions: Iterable[Completion], replica: str) -> list[ReceiptedRollout]:
        """Rollouts of `replica`, each with the receipts of its versions; refused while its last one is not CONFIRMED."""
        for place in self.places:
            if place[0] == replica:
                _require_confirmed(self._by_id[self._last[place]])
        stamped = []
        for each in completions:
            versions = dict.fromkeys(span.version for span in each.versions)
            stamped.append(
                ReceiptedRollout(each, tuple(self.vouched(version, replica) for version in versions))
            )
        return stamped

    def _read(self) -> None:
        for number, line in numbered_lines(self._path):
            where = f"{self._path.name}, line {number}"
            if not line.endswith(b"\n"):
                break  # a kill cut it off, and nobody heard of it
            sealed = decode_receipt(line, where)
            try:
                receipt = opened(sealed, self._key)
            except NoReceipt as error:
                raise NoReceipt(f"{where}: {error}") from error
            if sealed.id in self._by_id:
                raise RecordError(f"{where} is a receipt that stands above; put the file back as it was")
            self._take(sealed.id, receipt)

    def _take(self, name: str, receipt: Receipt) -> None:
        self._by_id[name], self._last[receipt.place] = receipt, name

    def require(self, rollouts: Iterable[ReceiptedRollout]) -> list[Completion]:
        """See `require_receipt`."""
        return [self._required(rollout) for rollout in rollouts]

    def _required(self, rollout: ReceiptedRollout) -> Completion:
        named = [self._named(each) for each in rollout.receipts]
        for version in dict.fromkeys(span.version for span in rollout.completion.versions):
            theirs = [each for each in named if _same(each.version, version)]
            if not theirs:
                raise NoReceipt(
                    f"a rollout of {version.label!r} carries no receipt of it; generate it by an engine that has one"
                )
            for each in theirs:
                self.vouched(version, each.replica)
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


def _same(receipt: WeightVersion, rollout: WeightVersion) -> bool:
    """A rollout may come with a label alone: servers show no digest."""
    return receipt.label == rollout.label and rollout.digest in (None, receipt.digest)

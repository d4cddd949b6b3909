"""What was measured after one update of one engine, sealed with a key, and what a trainer may train on. Torch-free.

    {"id": sha256 of the receipt as it stands here, "hmac": …, "receipt": {…}}

The seal says that a holder of the key measured it; a digest alone would say what anybody can write.
"""

import hashlib
import hmac
import math
import re

import msgspec

from zerodrift.core import require
from zerodrift.core.completion import Completion
from zerodrift.core.errors import InvalidValue, NoReceipt, RecordError, SchemaMismatch
from zerodrift.core.version import WeightVersion
from zerodrift.sync.judge import Arrival

SCHEMA = "zerodrift.receipt/2"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version on one rank of one replica of an engine."""

    schema: str = SCHEMA
    version: WeightVersion
    """What the trainer sent: its label, and the digest of its tensors."""
    parent: WeightVersion | None = None
    """The version that changes are counted from; None where nothing was measured."""
    engine: str
    """As backends are called: `vllm`, `exact`."""
    replica: str
    """Which copy of the engine, by the name or address that the caller gave it."""
    rank: int | None = None
    """Which rank of it; None where the engine answers as a whole."""
    engine_digest: str | None = None
    """Of the tensors that serve, by the engine itself; None where it shows none."""
    told: str | None = None
    """The label under which it answers; None where it shows none."""
    canary: str
    """Digest of the canary sequences."""
    tokens: int
    sequences: int
    arrival: Arrival
    cause: str | None = None
    message: str
    slope: float | None = None
    """Observed on predicted change; None where nothing was to change."""
    low: float | None = None
    high: float | None = None
    """Slopes beyond these are refused; None where nothing bounds it."""
    predicted: float
    """Root mean square of the predicted changes, in nats."""
    error: float
    """Mean |Δ| of engine and trainer on the canaries, after the update."""
    usual: float
    """The same before it."""
    needed: int | None = None
    """Canary tokens that would decide, where it is inconclusive."""
    false_alarm: float
    """Chance that MISSED is said of an update that arrived, at most."""
    follows: str | None = None
    """Id of the receipt in the line before, whosever it is; None in the first line."""
    at: float
    """Seconds since the epoch, for people."""
    seconds: float
    """How long it took."""

    def __post_init__(self) -> None:
        """One that can be true."""
        if self.schema != SCHEMA:
            raise SchemaMismatch(
                f"a receipt has schema {self.schema!r}, and this version reads {SCHEMA!r}; begin a ledger in another directory"
            )
        require.instance(InvalidValue, "version", self.version, WeightVersion)
        require.instance(InvalidValue, "arrival", self.arrival, Arrival)
        if (self.cause is None) == (self.arrival is Arrival.MISSED):
            raise InvalidValue(
                f"a receipt that is {self.arrival} has cause {self.cause!r}; what was missed has one"
            )
        numbers = (self.slope, self.low, self.high, self.predicted, self.error, self.usual, self.seconds)
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise InvalidValue("a receipt holds a number that is not finite; leave out what nothing bounds")

    @property
    def id(self) -> str:
        """sha256 over all that it says."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def is_hold(self) -> bool:
        """Whether it only says that the version was sent, or is about to be."""
        return self.arrival is Arrival.INCONCLUSIVE and self.parent is None

    @property
    def place(self) -> tuple[str, int | None]:
        """Whose it is."""
        return self.replica, self.rank


class SealedReceipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As it travels and stands on the disk."""

    id: str
    hmac: str
    receipt: Receipt


def seal(receipt: Receipt, key: bytes) -> SealedReceipt:
    """With the mark of whoever has `key`, over what will be read: an int where a float belongs comes back as another."""
    try:
        receipt = msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise InvalidValue(f"a receipt could not be read again once it is written: {error}") from error
    return SealedReceipt(receipt.id, _mark(receipt, key), receipt)


def opened(sealed: SealedReceipt, key: bytes) -> Receipt:
    """The receipt, where it was sealed with `key` and not touched since."""
    receipt = sealed.receipt
    if sealed.id != receipt.id or not hmac.compare_digest(sealed.hmac.encode(), _mark(receipt, key).encode()):
        raise NoReceipt(
            f"the receipt of {receipt.version.label!r} was not sealed with this key, or was edited since; "
            "take another, or give the key that it was made with"
        )
    return receipt


def decode_receipt(content: bytes, where: str) -> SealedReceipt:
    """What `content` holds; `where` is for messages."""
    try:
        return msgspec.json.decode(content, type=SealedReceipt)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise RecordError(f"{where} holds no receipt: {error}") from error


class ReceiptedRollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rollout, with the id of the receipt of each of the versions that made its tokens."""

    completion: Completion
    receipts: tuple[str, ...]
    replica: str = ""
    """Of the engine that made it."""
    hmac: str = ""
    """Over all of it, with the receipt key: receipts of one replica are not carried by rollouts of another."""

    def __post_init__(self) -> None:
        """Ids that could be."""
        require.instance(InvalidValue, "completion", self.completion, Completion)
        require.instance(InvalidValue, "replica", self.replica, str)
        require.instance(InvalidValue, "hmac", self.hmac, str)
        require.each(InvalidValue, "receipts", self.receipts, str)
        for each in self.receipts:
            if not _SHA256.fullmatch(each):
                raise InvalidValue(f"a rollout carries the receipt {each[:80]!r}; an id is 64 hex digits")


def stamped(completion: Completion, receipts: tuple[str, ...], replica: str, key: bytes) -> ReceiptedRollout:
    """With the mark of whoever has `key`."""
    bare = ReceiptedRollout(completion, receipts, replica)
    return msgspec.structs.replace(bare, hmac=_mark_of_rollout(bare, key))


def require_stamped(rollout: ReceiptedRollout, key: bytes) -> None:
    """As it was when it was stamped with `key`."""
    bare = msgspec.structs.replace(rollout, hmac="")
    if not hmac.compare_digest(rollout.hmac.encode(), _mark_of_rollout(bare, key).encode()):
        raise NoReceipt(
            f"a rollout of replica {rollout.replica!r} was not stamped with this key, or was edited since; stamp it by "
            "ReceiptLedger.stamp, where it is made"
        )


def _mark_of_rollout(bare: ReceiptedRollout, key: bytes) -> str:
    # As it is read again: an int where a float belongs comes back as another.
    again = msgspec.json.decode(msgspec.json.encode(bare), type=ReceiptedRollout)
    return hmac.new(key, msgspec.json.encode(again), hashlib.sha256).hexdigest()


def _mark(receipt: Receipt, key: bytes) -> str:
    return hmac.new(key, msgspec.json.encode(receipt), hashlib.sha256).hexdigest()

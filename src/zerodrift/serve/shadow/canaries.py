"""Receipts of an engine behind the proxy: it and the reference are asked about the same canaries, before an update and after it.

Beside the weights that the reference has, those of the last version that was confirmed are held: two models, and a third for as
long as a receipt is taken.
"""

from collections.abc import Sequence
from typing import Any

from zerodrift.backends.base import Capability
from zerodrift.backends.vllm import VllmBackend
from zerodrift.core.completion import Answer
from zerodrift.core.errors import EngineError, InvalidValue
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.serve.shadow.receipts import (
    CanariesUnasked,
    Overtaken,
    ReceiptDue,
    ReceiptState,
    TakenReceipt,
)
from zerodrift.serve.shadow.reference import ShadowReference
from zerodrift.sync.canary import random_canary
from zerodrift.sync.ledger import ReceiptLedger
from zerodrift.sync.receipt import Receipt
from zerodrift.sync.take import ReceiptTaker

ASK_S = 120.0
"""For one question."""
TOGETHER = 16
"""Questions in flight: clients ask as well."""
_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id")


class CanaryEngine(VllmBackend):
    """The engine itself, past the proxy; what it says while its weights may change is no answer."""

    due: ReceiptDue

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Of one version."""
        found = super().generate(requests)
        self._require_current()
        return found

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of one version."""
        found = super().score(sequences)
        self._require_current()
        return found

    def _require_current(self) -> None:
        if not self.due.is_current():
            raise Overtaken


class CanaryTaker:
    """For the thread of the reference alone."""

    def __init__(
        self, reference: ShadowReference, ledger: ReceiptLedger, url: str, key: str | None, tokens: int
    ) -> None:
        self._reference, self._ledger, self._url, self._key = reference, ledger, url, key
        config = reference.model.config
        told = [getattr(config, name, None) for name in _NAMES]
        special = [each for one in told for each in (one if isinstance(one, list) else [one])]
        avoid = [each for each in special if each is not None]
        self._canary = random_canary(reference.vocab_size, tokens, avoid=avoid)
        self._taker: ReceiptTaker | None = None
        self._shown: frozenset[Capability] = frozenset()

    def take(self, due: ReceiptDue) -> TakenReceipt | None:
        """See TakesReceipts."""
        model: Any = self._reference.model
        try:
            if self._taker is not None:
                return _of(self._asking(self._taker, due).take(model, _named(due), salt=due.salt))
            self._start(model, due)
        except (EngineError, InvalidValue) as error:
            # An engine that is paused for an update, or has gone, answers no question.
            raise (CanariesUnasked(str(error)) if due.is_current() else Overtaken()) from error
        if due.first:
            return None
        return self.leave_open(due, "what the engine said before this update is not known")

    def leave_open(self, due: ReceiptDue, why: str) -> TakenReceipt | None:
        """See TakesReceipts."""
        if self._taker is None:
            return None
        return _of(self._taker.hold(_named(due), f"no receipt could be taken: {why}"))

    def _start(self, model: Any, due: ReceiptDue) -> None:
        engine = CanaryEngine(
            self._url, api_key=self._key, timeout_s=ASK_S, concurrency=TOGETHER, explicit=True
        )
        try:
            self._shown = engine.capabilities
            taker = ReceiptTaker(engine, self._canary, self._ledger, place=(self._url, None))
            self._asking(taker, due).start(model, _named(due))
        except BaseException:
            engine.close()
            raise
        self._taker = taker

    def _asking(self, taker: ReceiptTaker, due: ReceiptDue) -> ReceiptTaker:
        engine = taker.engine
        assert isinstance(engine, CanaryEngine), f"receipts are taken of {engine!r}"
        engine.due = due
        # Where the trainer gives no label, the engine's says nothing of this update.
        hidden = {Capability.WEIGHT_VERSION} if due.label is None else set()
        engine.capabilities = self._shown - hidden
        return taker

    def close(self) -> None:
        """Drop the connections."""
        if self._taker is not None:
            self._taker.engine.close()


def _named(due: ReceiptDue) -> WeightVersion:
    return WeightVersion(due.label or f"version {due.version}")


def _of(receipt: Receipt) -> TakenReceipt:
    return TakenReceipt(ReceiptState(receipt.arrival.value), receipt.id, receipt.message, receipt.cause)

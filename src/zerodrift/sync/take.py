"""Take a receipt after every update: ask both sides about the canaries, judge, seal, and write it down.

    key = read_key(Path("receipt.key"))
    receipts = ReceiptTaker(engine, canary, ReceiptLedger(Path("runs/receipts"), key))
    receipts.start(model, version_0)
    …                                    # optimizer.step(), and the new weights are sent
    receipt = receipts.take(model, version_1)

Both sides' numbers of one version are what the next is compared with, so a receipt costs one scoring of the canaries by
the engine, one by the trainer, and one more for each part where parts are to be told apart.
"""

import math
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from zerodrift.backends.base import Backend, Capability, need
from zerodrift.core.completion import Completion
from zerodrift.core.errors import BadAnswer, OutOfOrder
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.stats.arrays import Floats
from zerodrift.sync.canary import Canary
from zerodrift.sync.judge import Arrival, CanaryFinding, CanaryScores, Shares, SideFacts, judge
from zerodrift.sync.ledger import Place, ReceiptLedger
from zerodrift.sync.measure import part_scores, rank_scores, trainer_scores
from zerodrift.sync.receipt import Receipt
from zerodrift.sync.slope import FALSE_ALARM
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.gathered import whole_state
from zerodrift.weights.listing import manifest_of

CACHED_PROMPT = 300
"""Tokens that fill a block of any prefix cache: vLLM's have 16 on a GPU and 128 on a CPU."""
RANKS = "tensor_parallel_size"
"""What engines call their number in a fingerprint."""

WORST_LAST = (Arrival.CONFIRMED, Arrival.INCONCLUSIVE, Arrival.MISSED)


class _Moment(NamedTuple):
    """What both sides said at one version."""

    version: WeightVersion
    trainer: Floats
    engine: Floats
    tensors: dict[str, torch.Tensor]
    """The trainer's, copied, where parts are told apart."""

    def predicted(self, before: "_Moment") -> Floats:
        """What came between does to an engine, by the trainer."""
        return self.trainer - before.trainer


class ReceiptTaker:
    """One replica of an engine, and the trainer's model."""

    def __init__(
        self,
        engine: Backend,
        canary: Canary,
        ledger: ReceiptLedger,
        *,
        place: Place = ("0", None),
        gate: float | None = None,
        parts: bool = True,
    ) -> None:
        """`place`: replica, and rank where each has an address of its own; `gate`: mean |Δ| that is allowed at all, as an audit of the engine found it; `parts`: keep a copy of the
        weights of the last version, to say which layer did not arrive, or which rank."""
        need(engine, Capability.SCORE, "a receipt needs logprobs of given tokens")
        self.engine, self.canary, self.ledger, self.place = engine, canary, ledger, place
        self._gate, self._parts = gate, parts
        self.ranks: int | None = None
        """Of tensor parallelism behind the engine's address; None: as many as it says itself."""
        self._last: _Moment | None = None
        self._sent: list[_Moment] = []
        """Since then and not confirmed, the latest first, without tensors: the engine may have any of them."""
        self._refilled: tuple[WeightVersion, str | None] | None = None
        """Version and salt by which the question about the cache was answered last, out of no cache: what is there is no older."""

    def start(self, model: Any, version: WeightVersion | str) -> None:
        """What both sides say before the first update: the weights that the engine was started with."""
        self._ask(None)
        self._last, self._sent, self._refilled = self._moment(model, _whole(model, version)), [], None

    def take(self, model: Any, version: WeightVersion | str, *, salt: str | None = None) -> Receipt:
        """After `version` was sent; `salt` is what rollouts of this version are asked with, where they are."""
        before = self.require_started()
        began = time.perf_counter()
        version = _whole(model, version)
        answer = self._ask(salt)
        cached = self._cached(answer, version, salt)
        after = self._moment(model, version)
        told, digest = self._told(answer, cached, before.version, version)
        if told.same_digest and told.settled and self._sent:
            receipt = self._gone_back(before, after, told)
        else:
            scores = self._scores(before, after)
            shares = self._shares(model, before, after) if self._parts else Shares()
            receipt = self._written(judge(scores, shares, told), scores, before.version, after.version)
        receipt = msgspec.structs.replace(
            receipt, told=told.answers_as, engine_digest=digest, seconds=time.perf_counter() - began
        )
        receipt = self.ledger.append(receipt).receipt
        # Changes are counted from the last version that both sides are known to have had: of updates that say too
        # little one by one the sum says more, and one that was missed may be sent again, under another label.
        if receipt.arrival is Arrival.CONFIRMED:
            self._last, self._sent = after, []
        if receipt.arrival is Arrival.MISSED:
            self._refilled = None  # by weights that it should not have
        if receipt.arrival is not Arrival.CONFIRMED and not told.same_digest:
            others = [each for each in self._sent if each.version.digest != after.version.digest]
            self._sent = [after._replace(tensors={}), *others]
        return receipt

    def _gone_back(self, before: _Moment, after: _Moment, told: SideFacts) -> Receipt:
        """`after` has the very weights of `before`, which was confirmed, and others were sent since: has the engine left each?"""
        found = []
        for sent in self._sent:
            # As it would answer by what was sent: changes are counted from there, and none is left where it came back.
            kept = sent._replace(engine=before.engine + sent.predicted(before))
            scores = self._scores(kept, after)
            finding = judge(scores, Shares(), told._replace(same_digest=False), among=len(self._sent))
            found.append((finding, scores, sent.version, after.version))
        return self._written(*max(found, key=lambda each: WORST_LAST.index(each[0].arrival)))

    def _scores(self, before: _Moment, after: _Moment) -> CanaryScores:
        return CanaryScores(before.trainer, after.trainer, before.engine, after.engine, self.canary.sequence)

    def require_started(self) -> _Moment:
        """What both sides said before the update; afterwards it is too late to ask."""
        if self._last is None:
            raise OutOfOrder("a receipt needs what both sides said before the update; call start() first")
        return self._last

    def hold(
        self, version: WeightVersion, message: str = "an update was sent, and no receipt was taken since"
    ) -> Receipt:
        """`version` was sent, or is about to be: nothing is known until a receipt is taken."""
        self._refilled = None
        nothing = np.zeros(2)
        scores = CanaryScores(nothing, nothing, nothing, nothing, np.arange(2))
        finding = judge(scores, Shares(), SideFacts())._replace(message=message, needed=self.canary.tokens)
        return self.ledger.append(self._written(finding, scores, None, version)).receipt

    def _moment(self, model: Any, version: WeightVersion) -> _Moment:
        engine = self.canary.flat("the engine", self.engine.score(self.canary.sequences))
        tensors = (
            {name: tensor.detach().clone() for name, tensor in checkpoint_state(model).items()}
            if self._parts
            else {}
        )
        return _Moment(version, trainer_scores(model, self.canary), engine, tensors)

    def _shares(self, model: Any, before: _Moment, after: _Moment) -> Shares:
        old, whole = before.tensors, after.trainer
        says = self.engine.fingerprint().numeric.get(RANKS, "")
        ranks = self.ranks or (int(says) if says.isdecimal() else 1)
        return Shares(
            part_scores(model, old, self.canary, whole), rank_scores(model, old, self.canary, whole, ranks)
        )

    def _ask(self, salt: str | None) -> Completion:
        """One token after a long prompt, as rollouts ask: under which label, and out of which cache?"""
        length = min(CACHED_PROMPT, self.engine.max_model_len - 1)
        ids = [token for sequence in self.canary.sequences for token in sequence]
        prompt = tuple((ids * (length // len(ids) + 1))[:length])
        [answer] = self.engine.generate(
            [Request(Prompt(prompt, None, salt), SamplingParams(max_tokens=1, seed=0))]
        )
        if not answer.completions or not answer.completions[0].versions:
            raise BadAnswer("the engine gave no token for a canary prompt, and its label cannot be read")
        return answer.completions[0]

    def _cached(self, answer: Completion, version: WeightVersion, salt: str | None) -> int:
        """Tokens of the question that came from a cache which other weights may have written; asked again, it was this one."""
        cached = 0 if self._refilled == (version, salt) else answer.cached_tokens or 0
        self._refilled = None if cached else (version, salt)
        return cached

    def _told(
        self, answer: Completion, cached: int, old: WeightVersion, new: WeightVersion
    ) -> tuple[SideFacts, str | None]:
        version = answer.versions[0].version
        label = version.label if Capability.WEIGHT_VERSION in self.engine.capabilities else None
        # The exact engine keys its cache by the weights, and what it takes from there is right.
        cached = 0 if version.digest is not None else cached
        told = SideFacts(
            same_digest=old.digest == new.digest,
            settled=self._settled(new),
            says_new=label == new.label,
            answers_as=label,
            cached_tokens=cached,
            other_digest=version.digest not in (None, new.digest),
            gate=self._gate,
        )
        return told, version.digest

    def _settled(self, new: WeightVersion) -> bool:
        """Whether all that was sent since the last confirmed version is known here; also by other processes, and before."""
        known = {new.digest, *(each.version.digest for each in self._sent)}
        return all(
            each.version.digest in known or each.version == WeightVersion(new.label)
            for each in self.ledger.since_confirmed(self.place)
        )

    def _written(
        self, finding: CanaryFinding, scores: CanaryScores, old: WeightVersion | None, new: WeightVersion
    ) -> Receipt:
        low, high = finding.fit.interval
        return Receipt(
            version=new,
            parent=old,
            engine=self.engine.name,
            replica=self.place[0],
            rank=self.place[1],
            canary=self.canary.digest,
            tokens=self.canary.tokens,
            sequences=len(self.canary.sequences),
            arrival=finding.arrival,
            cause=finding.cause,
            message=finding.message,
            slope=finding.fit.estimate if finding.fit.moves else None,
            low=low if math.isfinite(low) else None,
            high=high if math.isfinite(high) else None,
            predicted=float(np.sqrt((scores.predicted**2).mean())),
            error=finding.error,
            usual=finding.usual,
            needed=finding.needed,
            false_alarm=FALSE_ALARM,
            at=time.time(),
            seconds=0.0,
        )


def _whole(model: Any, version: WeightVersion | str) -> WeightVersion:
    """With the digest of the trainer's tensors, so that a receipt says what was to arrive."""
    label = version if isinstance(version, str) else version.label
    digest = manifest_of(whole_state(model).tensors).digest
    return WeightVersion(label, digest)

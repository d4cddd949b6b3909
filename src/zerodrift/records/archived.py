"""One batch of rollouts as a training run kept it: what the monitor hands to the archive, and blame reads.

A batch is archived because something may be wrong with it, so numbers are kept as they came: NaN (also for a logprob that is
missing) and logprobs above zero included. What cannot be put beside its token is refused: a column is as long as the
output, and spans of versions cover it.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import groupby

import msgspec

from zerodrift.core import require
from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.errors import DigestMismatch, InvalidCompletion, InvalidSampling, InvalidValue
from zerodrift.core.request import SHAPING, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion, check_cover

LARGEST_ID = 2**31 - 1
"""A segment keeps ids in 32 bits; the largest vocabulary there is has 2^18."""
OPTIONAL_LOGPROBS = ("old_logprobs", "current_logprobs", "rescored_logprobs")


class BatchState(StrEnum):
    """What the monitor made of a batch."""

    OK = "ok"
    WARN = "warn"
    QUARANTINE = "quarantine"
    HALT = "halt"


class ArchivedRollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sampled sequence with every number that was known of its tokens.

    Example: `ArchivedRollout(id="7/0", prompt_token_ids=(1, 5), token_ids=(9, 2), behavior_logprobs=(-0.1, -0.7))`.
    """

    id: str
    """Unique in its batch."""
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    """What the engine reported for each of `token_ids`; NaN where it reported nothing."""
    old_logprobs: tuple[float, ...] | None = None
    """The trainer's, before the update that the batch is for."""
    current_logprobs: tuple[float, ...] | None = None
    """The trainer's, under the weights it has now."""
    rescored_logprobs: tuple[float, ...] | None = None
    """The trainer's, under the weights that made the token."""
    versions: tuple[VersionSpan, ...] = ()
    """Which weights made which tokens; empty where nobody said."""
    mask: tuple[bool, ...] | None = None
    """Tokens that the policy sampled and the trainer learns from; None is all of them."""
    reward: float | None = None
    environment: str | None = None
    replica: str | None = None
    """Which copy of the engine answered."""
    group: str | None = None
    """Rollouts that share a prompt, for advantages."""
    sampling: SamplingParams = SamplingParams()
    stated: tuple[str, ...] = ()
    """Names of the parameters in `sampling` that are known; the others are defaults that nobody vouches for."""
    kind: LogprobKind | None = None
    """Which distribution the engine says its logprobs belong to."""
    finish_reason: FinishReason | None = None
    digest: str = ""
    """Of prompt, tokens and behaviour logprobs. Made where it is not given, and compared where it is."""

    def __post_init__(self) -> None:
        """What does not fit beside the tokens is refused."""
        require.instance(InvalidValue, "id", self.id, str)
        if not self.id:
            raise InvalidValue("a rollout's id is empty; rewards are bound to outputs by it")
        _check_ids("prompt_token_ids", self.prompt_token_ids)
        _check_ids("token_ids", self.token_ids)
        self._check_columns()
        self._check_labels()
        found = rollout_digest(self.prompt_token_ids, self.token_ids, self.behavior_logprobs)
        if self.digest not in ("", found):
            raise DigestMismatch(
                f"rollout {self.id!r} has the digest {found}, and is said to have {self.digest}: "
                "its prompt, tokens or logprobs are not those that were rewarded"
            )
        msgspec.structs.force_setattr(self, "digest", found)

    def _check_columns(self) -> None:
        """One entry per token."""
        length = len(self.token_ids)
        _check_numbers("behavior_logprobs", self.behavior_logprobs, length)
        for name in OPTIONAL_LOGPROBS:
            if (values := getattr(self, name)) is not None:
                _check_numbers(name, values, length)
        if self.mask is not None:
            _check_types("mask", self.mask, bool)
            _check_length("mask", len(self.mask), length)
        require.each(InvalidCompletion, "versions", self.versions, VersionSpan)
        if self.versions:
            check_cover(self.versions, length, "versions")

    def _check_labels(self) -> None:
        """What is known beside the tokens."""
        for name in ("environment", "replica", "group"):
            require.instance(InvalidValue, name, getattr(self, name), str | None)
        require.instance(InvalidValue, "kind", self.kind, LogprobKind | None)
        require.instance(InvalidValue, "finish_reason", self.finish_reason, FinishReason | None)
        require.instance(InvalidSampling, "sampling", self.sampling, SamplingParams)
        require.each(InvalidSampling, "stated", self.stated, str)
        if unknown := sorted({*self.stated} - {*SHAPING}):
            raise InvalidSampling(
                f"stated names {', '.join(unknown)}; a parameter is one of {', '.join(SHAPING)}"
            )
        # In one order: the digest of a batch is that of its bytes.
        msgspec.structs.force_setattr(self, "stated", tuple(sorted({*self.stated})))
        msgspec.structs.force_setattr(self, "sampling", _as_read_back(self.sampling))
        if self.reward is not None:
            if isinstance(self.reward, bool) or not isinstance(self.reward, int | float):
                raise InvalidValue(f"reward is {self.reward!r}; it is a number (of a tensor: .item())")
            msgspec.structs.force_setattr(self, "reward", float(self.reward))

    @property
    def version(self) -> str | None:
        """Labels of the weights that made it, in order; None where nobody said."""
        return "+".join(dict.fromkeys(span.version.label for span in self.versions)) or None


class ArchivedBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All rollouts of one decision of the monitor, and the decision."""

    step: int
    state: BatchState
    reasons: tuple[str, ...] = ()
    trainer_version: str | None = None
    """Label of the weights that the trainer had when it was handed the batch."""
    rollouts: tuple[ArchivedRollout, ...]

    def __post_init__(self) -> None:
        """A batch is of one step, holds something, and no rollout twice."""
        require.whole(InvalidValue, "step", self.step, "steps count from 0", 0, 2**63 - 1)
        require.instance(InvalidValue, "state", self.state, BatchState)
        require.each(InvalidValue, "reasons", self.reasons, str)
        require.instance(InvalidValue, "trainer_version", self.trainer_version, str | None)
        require.each(InvalidValue, "rollouts", self.rollouts, ArchivedRollout)
        if not self.rollouts:
            raise InvalidValue(f"the batch of step {self.step} has no rollout; there is nothing to keep")
        ids = [rollout.id for rollout in self.rollouts]
        if len(set(ids)) < len(ids):
            twice = next(each for each in ids if ids.count(each) > 1)
            raise InvalidValue(
                f"rollout {twice!r} is in the batch of step {self.step} twice; ids are unique in a batch"
            )

    @property
    def tokens(self) -> int:
        """Of all outputs."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def content_key(self) -> str:
        """Digest of step and contents, whatever was decided about them: whether to keep a healthy batch hangs on it."""
        parts = [
            str(self.step),
            *(part for rollout in self.rollouts for part in (rollout.id, rollout.digest)),
        ]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def rollout_digest(prompt: tuple[int, ...], tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> str:
    """128 bits of SHA-256 over lengths, ids and behaviour logprobs, as 64-bit numbers with the low byte first."""
    if any(map(math.isnan, logprobs)):
        # NaN has many bit patterns, and all of them say the same.
        logprobs = tuple(math.nan if math.isnan(value) else value for value in logprobs)
    hashed = hashlib.sha256(b"zerodrift.rollout/1")
    for ids in ((len(prompt), len(tokens)), prompt, tokens):
        hashed.update(struct.pack(f"<{len(ids)}q", *ids))
    hashed.update(struct.pack(f"<{len(logprobs)}d", *logprobs))
    return hashed.hexdigest()[:32]


def version_spans(labels: Sequence[str | int]) -> tuple[VersionSpan, ...]:
    """Spans of equal labels, from one label for each token."""
    spans, begin = [], 0
    for label, run in groupby(map(str, labels)):
        end = begin + len(list(run))
        spans.append(VersionSpan(WeightVersion(label), begin, end))
        begin = end
    return tuple(spans)


def _check_ids(name: str, ids: tuple[int, ...]) -> None:
    # Types as a set: a loop over a million ids in Python would take longer than writing them.
    if not isinstance(ids, tuple) or not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
        require.token_ids(InvalidCompletion, name, ids)
    if max(ids, default=0) > LARGEST_ID:
        raise InvalidCompletion(f"{name} hold {max(ids)}; a token id is at most {LARGEST_ID}")


def _check_numbers(name: str, values: tuple[float, ...], length: int) -> None:
    _check_types(name, values, float)
    _check_length(name, len(values), length)


def _check_types(name: str, values: object, kind: type) -> None:
    entries = require.a_tuple(InvalidCompletion, name, values)
    if wrong := set(map(type, entries)) - {kind}:
        found = ", ".join(sorted(each.__name__ for each in wrong))
        raise InvalidCompletion(
            f"{name} hold {found}; give a tuple of {kind.__name__} (of an array: .tolist())"
        )


def _check_length(name: str, given: int, length: int) -> None:
    if given != length:
        raise InvalidCompletion(f"{length} token_ids carry {given} {name}; each token needs one")


@lru_cache(maxsize=256)
def _as_read_back(sampling: SamplingParams) -> SamplingParams:
    """`temperature=1` comes back from disk as 1.0 and a bias in any order; the digest must not depend on which it was."""
    read = msgspec.json.decode(msgspec.json.encode(sampling), type=SamplingParams)
    return msgspec.structs.replace(read, logit_bias=dict(sorted(read.logit_bias.items())))

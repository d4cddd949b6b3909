"""Everything that zerodrift raises on purpose, in one tree.

A message says what happened, with which values, and what to do about it. `code` is stable: scripts may match on
it, and `docs/errors.md` has a heading for each (a test compares the two). `assert` is for our own bugs only.
"""

from collections.abc import Mapping
from typing import ClassVar


class ZerodriftError(Exception):
    """Root of the tree; catch this to catch everything that zerodrift raises on purpose."""

    code: ClassVar[str] = "zerodrift"
    exit_code: ClassVar[int] = 2
    """What the command line exits with: 2 for usage, 3 where an engine could not be judged."""


class InvalidValue(ZerodriftError, ValueError):
    """A value that cannot exist. Also a ValueError, so that decoders report it with its path."""

    code = "value/invalid"


class RanksDisagree(InvalidValue):
    """Ranks that do not speak of the same step, or of which one cannot read its batch: none has judged anything."""

    code = "value/ranks"


class InvalidPrompt(InvalidValue):
    """An empty prompt, or one with ids that the model does not have."""

    code = "value/prompt"


class InvalidSampling(InvalidValue):
    """Sampling parameters out of range, or contradicting each other."""

    code = "value/sampling"


class InvalidCompletion(InvalidValue):
    """A completion with missing logprobs, overlapping versions or other impossibilities."""

    code = "value/completion"


class NonFinite(InvalidValue):
    """NaN or an infinity where a number was promised. Never neutralised, always refused."""

    code = "value/non-finite"


class ContractViolation(InvalidValue):
    """Two sets of logprobs that do not mean the same thing were about to be compared."""

    code = "value/contract"


class RewardFailed(InvalidValue):
    """A reward function that raised, did not answer in time, or gave no finite number: nothing was trained on."""

    code = "train/reward"


class RewardMisbound(InvalidValue):
    """A reward that was given for another output than the one it stands beside."""

    code = "train/misbound"


class ConfigError(ZerodriftError):
    """A configuration that does not say what it means."""

    code = "config/invalid"


class UnknownKey(ConfigError):
    """A key that no section has; typos are refused, with the nearest real key."""

    code = "config/unknown-key"


class RetiredKey(ConfigError):
    """A key that only engines of the past had."""

    code = "config/retired-key"


class ModelError(ZerodriftError):
    """A model that cannot be loaded safely."""

    code = "model/invalid"


class ModelNotFound(ModelError):
    """No such directory, and no such built-in model."""

    code = "model/not-found"


class NoWeights(ModelError):
    """A model directory without safetensors weights."""

    code = "model/no-weights"


class TruncatedWeights(ModelError):
    """A safetensors file shorter, longer or other than its header says."""

    code = "model/truncated-weights"


class UnsafePath(ModelError):
    """A weight index that points outside its own directory."""

    code = "model/unsafe-path"


class UnsupportedModel(ModelError):
    """An architecture, or a part of one, that zerodrift does not claim to reproduce."""

    code = "model/unsupported"


class EngineError(ZerodriftError):
    """The engine under audit failed; the verdict is INCONCLUSIVE, never PASS."""

    code = "engine/failed"
    exit_code = 3
    status: int | None = None
    """Of the HTTP answer that this was; None where there was none."""


class EngineUnreachable(EngineError):
    """Nothing answers at the address, or it stopped answering."""

    code = "engine/unreachable"


class EngineRefused(EngineError):
    """The engine answered with a refusal (4xx)."""

    code = "engine/refused"


class BadAnswer(EngineError):
    """The engine answered with something that cannot be true."""

    code = "engine/bad-answer"


class ForeignTokens(BadAnswer):
    """Token ids came back that the reference's model does not have."""

    code = "engine/foreign-tokens"


class CapabilityMissing(EngineError):
    """The engine cannot do what a probe needs; the message names the flag that would enable it."""

    code = "engine/capability-missing"


class QueueFull(EngineError):
    """Our engine holds as many waiting requests as it may; the caller slows down or sheds load."""

    code = "engine/queue-full"


class UnknownRequest(EngineError):
    """An id that no unfinished request of our engine has."""

    code = "engine/unknown-request"


class DuplicateRequest(EngineError):
    """An id that an unfinished request of our engine already has."""

    code = "engine/duplicate-request"


class UnknownAdapter(EngineError):
    """No adapter of this name is loaded."""

    code = "engine/unknown-adapter"


class DuplicateAdapter(EngineError):
    """An adapter of this name is loaded already."""

    code = "engine/duplicate-adapter"


class AdapterInUse(EngineError):
    """An adapter cannot be unloaded under requests, nor its base be swapped under it."""

    code = "engine/adapter-in-use"


class OutOfBlocks(EngineError):
    """A request that would not fit into the whole KV memory of our engine, even alone."""

    code = "engine/kv-memory"


class EngineStopped(EngineError):
    """Something was asked of an engine loop that was stopped."""

    code = "engine/stopped"


class InvariantBroken(EngineError):
    """Our engine's own bookkeeping contradicts itself: a bug. It stops rather than serve wrong numbers."""

    code = "engine/invariant"
    dump: Mapping[str, object] | None = None
    """The state of the engine's books, where it was at hand."""


class UpdateFailed(EngineError):
    """A server that cannot go back failed while it took new weights: nobody knows what it serves, and nothing is asked of it."""

    code = "update/failed"


class RecordError(ZerodriftError):
    """A file of ours, or a dump, that cannot be read as what it claims to be."""

    code = "record/invalid"


class SchemaMismatch(RecordError):
    """A record written by another schema version."""

    code = "record/schema"


class DigestMismatch(RecordError):
    """Content that is not what its digest says."""

    code = "record/digest"


class ArchiveLocked(RecordError):
    """A second writer for an archive that has one; the message says who it is."""

    code = "record/locked"


class ArchiveFull(RecordError):
    """No room for another batch: it was not taken, and the caller still has it."""

    code = "record/full"


class VersionConflict(ZerodriftError):
    """Another version is current than was expected, a label was used before, or another update is under way."""

    code = "update/conflict"


class OutOfOrder(ZerodriftError):
    """A message of an update that came twice, too early, or after its end."""

    code = "update/out-of-order"


class NotRetained(ZerodriftError):
    """A version that was asked for and that nobody has kept."""

    code = "update/not-retained"


class NoReceipt(ZerodriftError):
    """A rollout, or an engine, without a receipt which says that the engine has the weights that it names."""

    code = "update/no-receipt"


class TrainingHalted(ZerodriftError):
    """The monitor's breaker opened: nothing more is trained on until somebody has looked."""

    code = "train/halted"
    exit_code = 3


class CheckpointMismatch(RecordError):
    """A checkpoint or a run of another model, another configuration, or another way to compute."""

    code = "train/checkpoint"


class ExactError(ZerodriftError):
    """Exact mode cannot keep its promise, and says so instead of computing something close."""

    code = "exact/failed"


class Unproven(ExactError):
    """An op whose rows were seen to change their bits with their neighbours, in every variant there is."""

    code = "exact/unproven"


class BitsDiffer(ExactError):
    """A sample that was scored again while the engine ran has other bits: the engine stops."""

    code = "exact/bits-differ"


class FingerprintMismatch(ExactError):
    """An engine and a trainer that do not compute alike."""

    code = "exact/fingerprint"


class MissingExtra(ZerodriftError):
    """A feature whose optional dependencies are not installed."""

    code = "install/missing-extra"


class OutOfMemory(ZerodriftError):
    """What was asked needs more memory than there is; nothing was judged by it."""

    code = "install/out-of-memory"
    exit_code = 3


class InstallFailed(ZerodriftError):
    """An engine's environment that could not be made."""

    code = "install/failed"
    exit_code = 3


class NoRoom(ZerodriftError):
    """A disk without room for what is about to be installed; nothing was begun."""

    code = "install/no-room"


class NothingDiffers(ZerodriftError):
    """Two ends between which a change was looked for, and which do not differ."""

    code = "bisect/alike"
    exit_code = 3


class EndNotJudged(ZerodriftError):
    """An end of a search that does not install, start or answer: nothing is known to have changed."""

    code = "bisect/end"
    exit_code = 3

"""What is a planted fault: which cause it plays, what it does in one sentence, and where it can be planted.

A fault hides as it would in the wild: what it changes is claimed to be as requested, and whatever the engine says
about itself (parameters, version, fingerprint) says nothing of it. Variants called visible are the exception.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.cause import CAUSES, Layer
from zerodrift.core.errors import CapabilityMissing, InvalidValue, ZerodriftError
from zerodrift.core.request import SamplingParams
from zerodrift.core.task import Scorer
from zerodrift.faults.wrapper import Plant, fact_of, host_in, innermost, unstated_defaults


class Need(Enum):
    """What an engine must have for a fault to be planted in it; how that is told, and what to do where it has not."""

    def __init__(
        self, holds: Callable[[Backend], object], advice: str, error: type[ZerodriftError] = CapabilityMissing
    ) -> None:
        self.holds = holds
        self.advice = advice
        self.error = error

    INSIDE = (
        lambda engine: host_in(engine) is not None,
        "it acts inside the exact or the reference engine, beneath semantic faults: plant it there, and before those",
    )
    # The reference runs what the exact engine is built to refuse, or does not have.
    REFERENCE = (
        lambda engine: isinstance(host_in(engine), ReferenceBackend),
        "it acts inside the reference engine (--engine reference) alone, beneath semantic faults: plant it before those",
    )
    # Nothing is to be seen before the first update.
    SYNC = (
        lambda engine: Capability.LOAD_WEIGHTS in engine.capabilities,
        "it acts when weights are loaded, and this engine cannot load any",
    )
    CHECKPOINT = (
        lambda engine: hasattr(innermost(engine), "spec"),
        "it keeps part of the old weights, and this engine does not say which checkpoint it started from",
    )
    SCORE = (
        lambda engine: Capability.SCORE in engine.capabilities,
        "it reports numbers from scoring, and this engine cannot score",
    )
    TOP_LOGPROBS = (
        lambda engine: Capability.TOP_LOGPROBS in engine.capabilities,
        "it reports the likeliest token, and this engine shows no alternatives",
    )
    STREAM = (
        lambda engine: Capability.STREAM in engine.capabilities,
        "it acts on streams, and this engine does not stream; the exact engine does (--engine exact)",
    )
    BOS = (
        lambda engine: fact_of(engine, "bos_token_id") is not None,
        "the engine does not know a BOS token; use one that has its model's files, of a model with a BOS",
    )
    TOKENIZER = (
        lambda engine: hasattr(innermost(engine), "tokenizer") or Capability.TOKENIZE in engine.capabilities,
        "it turns ids to text and back, and this engine has no tokenizer",
    )
    GENERATION_DEFAULTS = (
        unstated_defaults,
        "generation_config.json holds no sampling default that requests leave open: write top_p there, in a copy, and audit that",
        InvalidValue,
    )
    SLIDING_WINDOW = (
        lambda engine: fact_of(engine, "sliding_window"),
        "the model has no sliding window; use one that has, as testbed:mistral",
        InvalidValue,
    )
    NO_WINDOW = (
        lambda engine: not fact_of(engine, "sliding_window"),
        "the model has a sliding window of its own; use one that has none, as testbed:llama",
        InvalidValue,
    )
    TIED_HEAD = (
        lambda engine: fact_of(engine, "tied_head"),
        "the model's head is not tied to its embedding; use one whose is, as testbed:llama",
        InvalidValue,
    )
    # A matter of the requests, not of the engine: at temperature 1 and with nothing else set, nothing is to be seen.
    PROCESSING = (lambda _: True, "")
    # Likewise: what was requested and not drawn is known by scoring at temperature 1, and otherwise by logits alone.
    CLAIMED = (lambda _: True, "it reports what was requested of tokens that were drawn otherwise")
    # Likewise of the update: where it resets the prefix cache, nothing old is left in it.
    KEPT_CACHE = (lambda _: True, "it lives on what an update leaves in the prefix cache")
    # Likewise: an audit updates an engine of which nobody asks anything.
    IN_FLIGHT = (lambda _: True, "it acts on requests that are in flight when weights change")


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break an engine or a trainer on purpose."""

    cause: str
    """As in `core.cause.CAUSES`; an audit of the broken engine should name it."""
    variant: str
    message: str
    """What happens, in one sentence."""
    plant: Plant
    needs: tuple[Need, ...] = ()

    @property
    def spec(self) -> str:
        """`CAUSE:VARIANT`, as typed."""
        return f"{self.cause}:{self.variant}"

    @property
    def kind(self) -> Layer:
        """semantic, path, weights or trainer."""
        return CAUSES[self.cause].layer

    def inject(self, engine: Backend) -> Backend:
        """`engine` with this fault. Planting changes nothing in the one handed in; updates may pass on to it."""
        self.require_plantable(engine)
        broken: Backend = self.plant(engine)
        return broken

    def require_plantable(self, engine: Backend) -> None:
        """Raise where `inject` would, and say what this engine lacks."""
        if self.kind is Layer.TRAINER:
            raise InvalidValue(
                f"{self.spec} is a fault of the trainer and cannot be planted in an engine; "
                "score with Fault.scorer(model) in the trainer's place"
            )
        for need in self.needs:
            if not need.holds(engine):
                raise need.error(f"{self.spec} cannot be planted in {engine.name}: {need.advice}")

    def needs_reference(self, sampling: SamplingParams) -> bool:
        """Whether no other engine can have this fault where requests are such."""
        claims = Need.CLAIMED in self.needs and (sampling.greedy or not sampling.own_distribution)
        return claims or Need.REFERENCE in self.needs

    def check_visible(
        self,
        sampling: SamplingParams,
        *,
        engine: str,
        sync: bool,
        resets_cache: bool = False,
        trains: bool = False,
    ) -> None:
        """Refuse an audit, or a training (`trains`), that could not see this fault: its PASS would mean nothing."""
        if Need.IN_FLIGHT in self.needs and not trains:
            raise InvalidValue(
                f"{self.spec} acts on requests that are in flight when weights change, and an audit updates an engine of which "
                "nobody asks anything; plant it in a training: zerodrift train --set train.rollouts=reference --inject "
                f"{self.spec}"
            )
        if Need.CLAIMED in self.needs and sampling.truncates:
            raise InvalidValue(
                f"{self.spec} draws tokens that top-p, top-k or min-p would exclude, and those have no logprob; leave out "
                "top_p, top_k and min_p"
            )
        if Need.CLAIMED in self.needs and engine != ReferenceBackend.name and self.needs_reference(sampling):
            raise InvalidValue(
                f"{self.spec} reports what was requested, and {engine} scores the model's own distribution alone; add "
                "--engine reference, or leave out the temperature and the penalties"
            )
        if Need.PROCESSING in self.needs and sampling.own_distribution:
            raise InvalidValue(
                f"{self.spec} changes nothing at temperature {sampling.temperature:g} without truncation or penalties: "
                "raw and processed logprobs are the same numbers there; add --temperature 0.7"
            )
        if Need.SYNC in self.needs and not sync:
            raise InvalidValue(
                f"{self.spec} acts when weights are updated, and this audit updates none; add --sync"
            )
        if Need.KEPT_CACHE in self.needs and resets_cache:
            raise InvalidValue(
                f"{self.spec} acts in what an update leaves in the prefix cache, and this audit resets it at every update, "
                "which keeps the fault from acting; add --no-reset-cache"
            )

    def scorer(self, model: Any) -> Scorer:
        """A trainer's forward with this fault, over a transformers causal LM."""
        if self.kind is not Layer.TRAINER:
            raise InvalidValue(f"{self.spec} is a fault of the engine; plant it with Fault.inject(engine)")
        broken: Scorer = self.plant(model)
        return broken

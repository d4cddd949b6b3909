"""What is audited, against what, how thoroughly: everything that is decided before the first question."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from zerodrift.audit.plan import LONG_PROMPT, UNCACHED_PROMPT, parity_requests, probe_requests
from zerodrift.audit.progress import Progress, Silent
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.task import Scorer, Task
from zerodrift.records.baseline import BaselineHeader, BaselineRow
from zerodrift.records.verdict import Probe


class RecordedBaseline(NamedTuple):
    """What `zerodrift baseline record` wrote, as far as an audit needs it."""

    header: BaselineHeader
    rows: Sequence[BaselineRow]


@dataclass(frozen=True, kw_only=True)
class AuditSetup:
    """The sides, the prompts, and how they are sampled."""

    engine: Backend
    reference: ReferenceBackend
    trainer: Scorer | None = None
    """The trainer's own forward, where the user brings it."""
    baseline: RecordedBaseline | None = None
    """Recorded ground truth, where there is one."""
    task: Task | None = None
    """Gave the prompts and rewards what is made of them, where the user brings one."""
    prompts: Sequence[Prompt]
    sources: str = ""
    """Where they come from, for the verdict."""
    sampling: SamplingParams
    validation: ValidationConfig
    precision: Precision
    directory: Path
    checkpoint: Path | None = None
    """A directory with the reference's weights; enables the weight-sync probe."""
    resets_cache: bool = True
    """Whether the trainer's own update resets the prefix cache."""
    seeded: bool = True
    """Whether requests carry seeds. Without, samples are judged as well, and probes that repeat them are not."""
    progress: Progress = field(default_factory=Silent)

    @property
    def required(self) -> tuple[Probe, ...]:
        """Probes without which the verdict cannot be PASS: the engine's numbers and samples, and all that was brought."""
        brought = {
            Probe.BASELINE: self.baseline,
            Probe.TRAINER: self.trainer,
            Probe.WEIGHT_SYNC: self.checkpoint,
            Probe.REWARDS: self.task,
        }
        return (
            *(Probe.CONTRACT, Probe.PARITY, Probe.SAMPLING),
            *(probe for probe, given in brought.items() if given is not None),
        )

    def requests(self) -> list[Request]:
        """What the engine is asked for parity."""
        return self._askable(self.planned())

    def planned(self) -> list[Request]:
        """The same, with seeds."""
        trials, seed = self.validation.equivalence_trials, self.validation.seed
        return parity_requests(self.prompts, self.sampling, trials, seed)

    def probe_requests(self, seed: int, count: int) -> list[Request]:
        """What probes ask that compare an engine with itself: at temperature 1, long enough for a cache."""
        facts = self.reference.facts
        room = min(self.engine.max_model_len, facts.context_length)
        special = self.reference.tokenizer.all_special_ids
        cached = Capability.CACHED_TOKENS in self.engine.capabilities
        longest = LONG_PROMPT if cached else UNCACHED_PROMPT
        return self._askable(probe_requests(facts.vocab_size, room, special, seed, count, longest))

    def _askable(self, requests: list[Request]) -> list[Request]:
        if self.seeded:
            return requests
        return [Request(each.prompt, msgspec.structs.replace(each.sampling, seed=None)) for each in requests]

"""`verdict.json`: what an audit concluded, for machines and for the report."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.frozen import freeze
from zerodrift.records.evidence import LocatedEvidence, Power

SCHEMA = "zerodrift.verdict/2"


class Outcome(StrEnum):
    """PASS is said only when every required question was asked and answered."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 gate failed, 3 could not judge."""
        return {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INCONCLUSIVE: 3}[self]


class Probe(StrEnum):
    """Every question that a verdict can hold the answer to."""

    CONTRACT = "contract"
    TOKENIZER = "tokenizer"
    TEMPLATE = "template"
    ENDS = "ends"
    """Prefixes after which an end is likely: does it come as often as it is due?"""
    PARITY = "parity"
    SAMPLING = "sampling"
    GREEDY = "greedy"
    REPEAT = "repeat"
    BATCH = "batch"
    CACHE = "cache"
    STREAM = "stream"
    PREFILL_DECODE = "prefill-decode"
    UNSEEDED = "unseeded"
    """Requests without a seed, of the same prompts."""
    MIXED = "mixed"
    """Requests in one call, each with sampling parameters of its own."""
    RETURN = "return"
    """Requests of the audit, asked again at its end."""
    SELF_CONSISTENCY = "self-consistency"
    """Stands for the probes of an engine against itself where none could run."""
    HEAD_PRECISION = "head-precision"
    GIVEN_TOKENS = "given-tokens"
    BASELINE = "baseline"
    SETTINGS = "settings"
    TRAINER = "trainer"
    WEIGHT_SYNC = "weight-sync"
    REWARDS = "rewards"
    DUMP = "dump"
    PARAMETERS = "parameters"
    PREVIOUS_WEIGHTS = "previous-weights"
    PARITY_SINCE = "parity-since"
    SAMPLING_SINCE = "sampling-since"
    TRAINER_SINCE = "trainer-since"

    @property
    def about_engine_itself(self) -> bool:
        """Compares answers that came whole with each other: a gap may be the cause of Δ, or a consequence."""
        return self in {Probe.REPEAT, Probe.BATCH, Probe.CACHE, Probe.PREFILL_DECODE, Probe.RETURN}

    @property
    def of_the_rollouts(self) -> bool:
        """What it finds may explain the rollouts whose rewards were compared."""
        return self not in {Probe.TRAINER, Probe.WEIGHT_SYNC, Probe.REWARDS}


class FoundBy(StrEnum):
    """How a cause was found where no probe names it by itself."""

    VALUE = "attribution"
    """An explanation predicts the reported numbers."""
    SIZE = "attribution by size"
    """Only the size of Δ speaks for it."""


class CauseFound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A named cause with its evidence and its fix."""

    cause: str
    gating: bool
    explained: float
    """Share of the difference that goes away under the hypothesis."""
    interval: tuple[float, float]
    evidence: str
    fix: str
    found_by: str
    """The `Probe` that found it, or `FoundBy`."""
    # Not a plain (), which would be left out: files have always said that nothing is located.
    located: tuple[LocatedEvidence, ...] = msgspec.field(default_factory=lambda: ())
    """Where inside the model the difference sits, where that is known."""
    follows_rounding: bool = False
    """Δ goes token by token with what rounding the weights does: it is more than as large."""
    retells_probe: bool = False
    """The evidence is what the failed probe says, for want of anything better."""
    particular_fix: bool = False
    """The fix was written for this finding; otherwise it is the one that the cause has for the engine."""


class ProbeRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question and its answer."""

    name: str
    """A `Probe`; a file may hold one that this version does not know."""
    status: Outcome
    required: bool
    """Whether the verdict waits for it."""
    vacuous: bool = False
    """The question was asked and its premise did not hold (no batch formed, no cache hit)."""
    cut_off: bool = False
    """The engine failed while it was asked; what came before is kept, and the run can be resumed."""
    message: str
    evidence: Mapping[str, float | int | str | bool] = {}
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Evidence is not touched after the fact."""
        freeze(self, "evidence")


class VerdictRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole conclusion."""

    schema: str = SCHEMA
    verdict: Outcome
    guilty: str
    """Which side left the other two: `engine`, `trainer`, `none` or `unknown`."""
    message: str
    """The conclusion in one sentence."""
    engine: EngineFingerprint
    reference: EngineFingerprint
    model: str
    precision: str
    floor: Mapping[str, float]
    metrics: Mapping[str, float]
    gates: Mapping[str, float]
    causes: tuple[CauseFound, ...] = ()
    """The first is the principal one."""
    probes: tuple[ProbeRecord, ...] = ()
    power: tuple[Power, ...] = ()
    """What a PASS could have overlooked: from where on each kind of deviation would have been seen."""
    reproduce: str = ""
    """A command that repeats the audit."""
    smallest: str = ""
    """The smallest request that still shows the difference, in words; empty where there is none."""
    reproduce_smallest: str = ""
    """A command that repeats only that."""
    side: str = ""
    """The guilty side of recorded rollouts, in a sentence, …"""
    since: str = ""
    """… and when it went wrong; an audit, which is of now, has neither."""

    def __post_init__(self) -> None:
        """What was concluded stays."""
        freeze(self, "floor", "metrics", "gates")

    @property
    def to_fix(self) -> tuple[CauseFound, ...]:
        """Causes that fail the audit, principal first; the others are known, and not in the way."""
        return tuple(cause for cause in self.causes if cause.gating)

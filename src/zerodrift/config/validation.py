"""What does an audit compare, on how much data, and where does it draw the line?

Gates come from the precision profile; a user may tighten or loosen each, and `tolerance` can only tighten.
"""

import msgspec

from zerodrift.config.model import Device, ReferenceDtype
from zerodrift.config.precision import PROFILES, Magnitude, Precision
from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import MAX_SEED

MOST_TRIALS = 1_000_000
_POSITIVE = "it is a positive number of nats; null leaves it to the precision profile"


class GateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gates of one's own, each in place of the precision profile's."""

    mean_abs: float | None = None
    """Largest mean of |Δ|."""
    p90_abs: float | None = None
    """Largest 90th percentile of |Δ|."""
    k3: float | None = None
    """Largest mean of k3."""

    def __post_init__(self) -> None:
        """A gate of zero would fail two equal engines for their last bit."""
        for name in self.__struct_fields__:
            if (value := getattr(self, name)) is not None:
                require.real(InvalidValue, name, value, _POSITIVE, 1e-15)


class ValidationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One audit: reference, prompts, amount of evidence, gates."""

    reference_model: str | None = None
    """Checkpoint that the reference scores with; None takes `model.path`, as an audit should."""
    reference_dtype: ReferenceDtype = "auto"
    """Dtype of the reference; `auto` is fp64 for tiny models and fp32 for others, to keep its own rounding out."""
    reference_device: Device = "cpu"
    """Where the reference computes."""
    prompts: str | None = None
    """JSON-lines file of prompts; None takes those that ship with zerodrift."""
    baseline: str | None = None
    """File of `zerodrift baseline record`: ground truth that was written before, elsewhere. None samples it anew."""
    trainer: str | None = None
    """The trainer's own forward, as `zerodrift audit --trainer` takes it; None leaves that side out."""
    task: str | None = None
    """Prompts with a reward, as `zerodrift audit --task` takes them; None asks prompts that have none."""
    num_prompts: int = 32
    """Prompts to use."""
    property_based_prompts: bool = True
    """Generate a fifth of the prompts also where a file is given: odd lengths, scripts, whitespace, repetitions."""
    equivalence_trials: int = 64
    """Sampled sequences that the verdict rests on, dealt over the prompts in turn, each with its own seed."""
    max_tokens: int = 32
    """Tokens sampled per sequence."""
    position_probes: tuple[float, ...] = ()
    """Add sequences of these lengths, as fractions of the trained context: 1.25 is a quarter beyond it."""
    seed: int = 0
    """All randomness of the audit follows from it."""
    precision: Precision | None = None
    """Lowest precision that either side computes in; picks the gates. None reads it off the engine's own dtype."""
    tolerance: float | None = None
    """Extra cap on mean k3, in nats; None adds none."""
    gates: GateConfig = GateConfig()
    """Gates in place of the precision profile's."""

    def __post_init__(self) -> None:
        """Evidence must exist, and every prompt must be used."""
        for name in ("reference_model", "prompts", "baseline", "trainer", "task"):
            if getattr(self, name) == "":
                raise InvalidValue(f"{name} is an empty string; name a path, or leave it null")
        self._check_task()
        rule = f"use from 1 to {MOST_TRIALS} prompts"
        require.whole(InvalidValue, "num_prompts", self.num_prompts, rule, 1, MOST_TRIALS)
        prompts = self.num_prompts + len(self.position_probes)
        rule = (
            f"at most {MOST_TRIALS} trials"
            if isinstance(self.equivalence_trials, int) and self.equivalence_trials > MOST_TRIALS
            else f"each of {prompts} prompts is sampled at least once: {prompts} trials or more (--trials), or fewer "
            "prompts (--num-prompts)"
        )
        require.whole(InvalidValue, "equivalence_trials", self.equivalence_trials, rule, prompts, MOST_TRIALS)
        require.whole(InvalidValue, "max_tokens", self.max_tokens, "sample at least one token", 1)
        require.whole(InvalidValue, "seed", self.seed, "it is a 63-bit count", 0, MAX_SEED)
        for probe in self.position_probes:
            rule = "each is a fraction of the trained context, from 0.01 to 16"
            require.real(InvalidValue, "position_probes entry", probe, rule, 0.01, 16)
        if self.tolerance is not None:
            require.real(InvalidValue, "tolerance", self.tolerance, _POSITIVE, 1e-15)

    def _check_task(self) -> None:
        """A task rewards its own prompts, and knows no reward for others."""
        if self.task is not None and self.prompts is not None:
            raise InvalidValue(
                f"prompts are {self.prompts!r} beside task {self.task!r}, which brings its own; "
                "leave out --prompts, or --task"
            )
        if self.task is not None and self.position_probes:
            raise InvalidValue(
                f"position_probes are prompts of their own, for which task {self.task!r} has no reward; "
                "leave them to an audit without --task (--set validation.position_probes=[])"
            )

    @property
    def own_gates(self) -> frozenset[str]:
        """Names of the gates that the user set: no floor moves those."""
        return frozenset(
            name for name in GateConfig.__struct_fields__ if getattr(self.gates, name) is not None
        )

    def gate_for(self, precision: Precision) -> Magnitude:
        """The gates before any floor in this precision: the profile's, one's own in their place, and the cap."""
        own = {name: getattr(self.gates, name) for name in self.own_gates}
        gate = msgspec.structs.replace(PROFILES[precision].gate, **own)
        if "k3" not in own and gate.least_k3 > max(gate.k3, PROFILES[precision].gate.least_k3):
            raise InvalidValue(
                f"gates {own} of your own let pass what the profile's gate of k3, {gate.k3:.3g}, never would: a |Δ| of "
                f"that size has a k3 of {gate.least_k3:.3g}; set validation.gates.k3 too, or lower the others"
            )
        if self.tolerance is not None:
            gate = msgspec.structs.replace(gate, k3=min(gate.k3, self.tolerance))
        return gate

"""What is known of a cause: what it means, the fix as a user would type it, and how decisions treat it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from zerodrift.core.frozen import FrozenDict, freeze

ANY_ENGINE = "*"


class Layer(StrEnum):
    """Where a fault lives, from the cheapest to check to the dearest."""

    SEMANTIC = "semantic"
    """The number means something else."""
    PATH = "path"
    """The number means the right thing and was computed another way."""
    WEIGHTS = "weights"
    """The number belongs to other weights."""
    TRAINER = "trainer"
    """The engine is right; the trainer's forward is not."""
    OBJECTIVE = "objective"
    """The numbers are right and used wrongly."""
    NONE = "unexplained"


class Expected(StrEnum):
    """What a cause lets a probe find, if it is all that is wrong."""

    CLEAN = "clean"
    """It does not reach what the probe asks."""
    OFF = "off"
    """It cannot but show there as well."""


OF_SAMPLED_TOKENS: Mapping[str, Expected] = FrozenDict(
    {"given-tokens": Expected.CLEAN, "batch": Expected.CLEAN, "cache": Expected.CLEAN}
)
"""Of what is done between the logits and the report of a sampled token: prompt scores are neither sampled nor processed,
and the same is done alone, in company, and behind a cached prefix."""
OF_THE_MODEL: Mapping[str, Expected] = FrozenDict({"given-tokens": Expected.OFF})
"""Of other weights: whatever goes through them shows it."""

OF_ITS_PLACE: Mapping[str, Expected] = FrozenDict({"batch": Expected.CLEAN})
"""Of what a token's own place in its sequence decides: company does not."""

AFTER_AN_UPDATE: Mapping[str, Expected] = FrozenDict({"batch": Expected.CLEAN, "cache": Expected.CLEAN})
"""Of weights that an update left wrong: the same ones answer alone, in company, and behind a cached prefix."""


class Cause(msgspec.Struct, frozen=True):
    """One way for an engine and a trainer to disagree."""

    name: str
    message: str
    """One sentence for the report: what is going on."""
    fixes: Mapping[str, str]
    """Engine name, or `trainer`, to what to type there; ANY_ENGINE where the fix is the same everywhere."""
    gating: bool = True
    """Whether it fails an audit by itself; a listed rounding effect below the gate does not."""
    approximate: bool = False
    """Engines round in other places and by other schemes than an explanation of it: that takes most of Δ away where it
    is true. Every other one is exact where it is true, and brings Δ to the floor."""
    outranks: bool = False
    """Stands before all others: what else is wrong with another model is no fault of its own."""
    in_trainer: str | None = None
    """What it is called where a trainer's numbers show it; None: the same."""
    when_hidden: str | None = None
    """What it is called where the reported numbers are right and only the draws are not; None: the same."""
    of_record: bool = False
    """Rollouts were written down wrongly: neither engine nor trainer is to blame."""
    unless_requested: tuple[str, ...] = ()
    """Sampling parameters under which a sound engine shows the same, had they been requested."""
    predicts: Mapping[str, Expected] = {}
    """Probe to what it finds where this is all that is wrong: a name whose prediction fails is taken away."""
    in_force: Mapping[str, Mapping[str, str]] = {}
    """Engine to the settings that its fingerprint shows where the fix for it is in force already."""

    def __post_init__(self) -> None:
        """What was written stays."""
        freeze(self, "fixes", "predicts", "in_force")

    @property
    def layer(self) -> Layer:
        """The first word of the name."""
        return Layer(self.name.split("/")[0])

    def fix(self, engine: str) -> str:
        """What to type for `engine`."""
        return self.fixes.get(engine, self.fixes[ANY_ENGINE])

    def already(self, engine: str, settings: Mapping[str, str]) -> str:
        """The setting by which the fix for `engine` is in force already; empty where it is not known to be."""
        wanted = self.in_force.get(engine, {})
        there = wanted and all(settings.get(name) == value for name, value in wanted.items())
        return ", ".join(f"{name}={value}" for name, value in wanted.items()) if there else ""


_FLAGS = frozenset(Cause.__struct_fields__) - {"name", "message", "fixes"}


def cause(name: str, message: str, fix: str, **more: Any) -> Cause:
    """An entry: what to type anywhere, then flags of `Cause` and what to type at an engine, `llama_cpp="…"`."""
    fixes = {ANY_ENGINE: fix}
    fixes |= {engine.replace("_", "-"): there for engine, there in more.items() if engine not in _FLAGS}
    return Cause(name, message, fixes, **{flag: more[flag] for flag in _FLAGS & more.keys()})

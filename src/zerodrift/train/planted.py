"""Faults that a training plants in its engine, from some step on: which, whether a run can go on with them, and a run without."""

from collections.abc import Sequence

import msgspec

from zerodrift.config.run import RunConfig
from zerodrift.core.cause import Layer
from zerodrift.core.errors import ConfigError, InvalidValue
from zerodrift.faults.fault import Fault
from zerodrift.faults.registry import FAULTS, resolve


def faults_of(config: RunConfig) -> list[Fault]:
    """Each once, innermost first."""
    named = [resolve(spec).spec for spec in config.train.inject]
    for spec in named:
        if named.count(spec) > 1:
            raise InvalidValue(f"train.inject names {spec} twice; a fault is planted once")
    return sorted((FAULTS[spec] for spec in named), key=lambda fault: list(FAULTS).index(fault.spec))


def ends_with_its_process(config: RunConfig) -> list[str]:
    """Faults that live on what an engine kept of weights from before, which nobody can give it back."""
    return [fault.spec for fault in faults_of(config) if fault.kind is Layer.WEIGHTS]


def check_resumable(config: RunConfig, step: int) -> None:
    """What an engine kept of weights from before is gone with its process."""
    kept = ends_with_its_process(config)
    if kept and step >= config.train.inject_from:
        raise ConfigError(
            f"{', '.join(kept)} was planted at step {config.train.inject_from} and lives on weights from before, which went with the "
            f"process; nothing can go on from step {step}: start the run anew"
        )


def without_faults(config: RunConfig, names: Sequence[str]) -> RunConfig:
    """The same run, had these never been planted; a cause stands for all of its variants."""
    planted = [fault.spec for fault in faults_of(config)]
    left = list(planted)
    for name in names:
        taken = [spec for spec in planted if name in (spec, spec.partition(":")[0])]
        if not taken:
            there = f"it was planted with {', '.join(planted)}" if planted else "nothing was planted in it"
            raise InvalidValue(f"there is no {name} to take out of that run; {there}")
        left = [spec for spec in left if spec not in taken]
    train = msgspec.structs.replace(
        config.train, inject=tuple(left), inject_from=config.train.inject_from if left else 0
    )
    return msgspec.structs.replace(config, train=train)

"""Faults that act inside an engine act inside the exact one too, or are refused there."""

from pathlib import Path

import pytest

from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import CapabilityMissing
from zerodrift.core.version import WeightVersion
from zerodrift.faults.damage import Damaged
from zerodrift.faults.fault import Need
from zerodrift.faults.registry import FAULTS

INSIDE = [name for name, fault in FAULTS.items() if Need.INSIDE in fault.needs]
ELSEWHERE = [name for name, fault in FAULTS.items() if Need.REFERENCE in fault.needs]
SEQUENCES = [tuple(range(4, 84)), tuple(range(9, 90))]
"""Two: a fault that depends on the batch needs one. Longer than 64: another counts positions wrongly from there."""


@pytest.fixture
def exact(llama: ReferenceBackend) -> ExactBackend:
    return ExactBackend(llama.spec)


def test_a_damage_that_does_nothing_changes_nothing(exact: ExactBackend) -> None:
    assert Damaged(exact, lambda model: None).score(SEQUENCES) == exact.score(SEQUENCES)


@pytest.mark.parametrize("name", INSIDE)
def test_every_one_changes_numbers_and_leaves_the_engine_whole(name: str, exact: ExactBackend) -> None:
    sound = exact.score(SEQUENCES)
    broken = FAULTS[name].inject(exact)
    assert broken.score(SEQUENCES) != sound
    assert exact.score(SEQUENCES) == sound
    assert broken.fingerprint() == exact.fingerprint(), "a fault does not announce itself"


@pytest.mark.parametrize("name", ["path/head-precision:bf16", "path/weight-quantisation:4-bit"])
def test_it_outlives_an_update(name: str, exact: ExactBackend, update: Path) -> None:
    broken = FAULTS[name].inject(exact)
    before = broken.score(SEQUENCES)
    broken.load_weights(update, WeightVersion("new"))
    healthy = ExactBackend(str(update))
    assert broken.score(SEQUENCES) not in (before, healthy.score(SEQUENCES))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_it_cannot_run_is_refused(name: str, exact: ExactBackend) -> None:
    with pytest.raises(CapabilityMissing, match="--engine reference"):
        FAULTS[name].inject(exact)

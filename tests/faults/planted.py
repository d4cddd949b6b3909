"""What describes a bug that the auditor was not written for."""

from collections.abc import Callable
from dataclasses import dataclass

from zerodrift.backends.base import Backend
from zerodrift.core.request import SamplingParams

UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Planted:
    """One way to break an engine that has no injector of its own."""

    name: str
    says: str
    """What happens, in one sentence."""
    plant: Callable[[Backend], Backend]
    """Over a reference engine; the one handed in stays as it is."""
    true_names: frozenset[str]
    """Causes of `core.cause` whose sentence is true of it; where there is none, only `unexplained` is right."""
    tell: SamplingParams | None = None
    """Settings under which it shows; None where temperature 0.7 and some 24 tokens do."""

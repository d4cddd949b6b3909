"""`preflight.json`: a checklist with an answer and its evidence per item, for machines and for the page."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from zerodrift.core.frozen import FrozenFacts
from zerodrift.records.codec import write_atomically
from zerodrift.records.document import document_content, read_document
from zerodrift.records.rewards import Rewards
from zerodrift.records.seal import check_seal, write_seal

PREFLIGHT = "preflight.json"
PREFLIGHT_SEAL = "preflight.seal.json"
"""Its own, because the audit's is written before the checklist, and anew where an audit goes on."""
SCHEMA = "zerodrift.preflight/2"


class Status(StrEnum):
    """How an item ended, worst first; SKIPPED decides nothing."""

    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    WARN = "WARN"
    PASS = "PASS"
    SKIPPED = "SKIPPED"

    @property
    def exit_code(self) -> int:
        """As everywhere: 0 may train, 1 must not, 3 could not judge."""
        return {Status.FAIL: 1, Status.INCONCLUSIVE: 3}.get(self, 0)


def worst(statuses: Iterable[Status]) -> Status:
    """The one that decides; SKIPPED where there is nothing else."""
    return min(statuses, key=list(Status).index, default=Status.SKIPPED)


class Item(FrozenFacts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the checklist."""

    name: str
    status: Status
    message: str
    """The evidence in a sentence, or why there is none."""
    details: tuple[str, ...] = ()
    """What it rests on, a sentence each."""
    facts: Mapping[str, float | int | str | bool] = {}
    """What it rests on, in numbers."""
    type: tuple[str, ...] = ()
    """What to type where it did not pass."""


class PreflightRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole checklist."""

    schema: str = SCHEMA
    status: Status
    """The worst of the items."""
    config: str
    """The file that was checked."""
    engine: str
    model: str
    items: tuple[Item, ...]
    """In the order in which they were asked."""
    rewards: Rewards | None = None
    """The engine's in this run, as a line of a history has them."""
    reproduce: str = ""
    """A command that repeats it."""


def write_preflight(directory: Path, record: PreflightRecord) -> Path:
    """`preflight.json`, and before it the seal."""
    content = document_content(PREFLIGHT, record)
    write_seal(directory, (), {PREFLIGHT: content}, PREFLIGHT_SEAL)
    write_atomically(directory / PREFLIGHT, content)
    return directory / PREFLIGHT


def read_preflight(directory: Path) -> PreflightRecord:
    """The checklist of a finished preflight; refused where it was altered since."""
    record = read_document(directory / PREFLIGHT, PreflightRecord, SCHEMA, "preflight")
    check_seal(directory, (PREFLIGHT,), PREFLIGHT_SEAL)
    return record

"""What a search leaves behind: one directory, to go on with, and to compare otherwise.

bisect.json        what is looked at, in which order
NNN-NAME/          one of each that was looked at
  tried.json       whether it could be judged, or why not; how long it took, what was installed; sealed by tried.seal.json
  install.log      what pip said
  audit/           the audit, as `zerodrift audit` leaves it, with the server's log
answer.json        between which two the change lies; sealed by seal.json
model/             the built-in model, where no other is named
environments/      what is installed at the moment
"""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from zerodrift.bisect.states import ChangeKind, KindFound
from zerodrift.core.errors import RecordError
from zerodrift.core.frozen import freeze
from zerodrift.records.codec import write_atomically
from zerodrift.records.document import document_content, read_document, write_document
from zerodrift.records.seal import SEAL, check_seal, write_seal

QUESTION, TRIED, ANSWER = "bisect.json", "tried.json", "answer.json"
TRIED_SEAL = "tried.seal.json"
AUDIT, LOCK, MODEL, ENVIRONMENTS = "audit", ".lock", "model", "environments"
QUESTION_SCHEMA, TRIED_SCHEMA, ANSWER_SCHEMA = (
    f"zerodrift.bisect-{each}/1" for each in ("question", "tried", "answer")
)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: a release, and how it is started."""

    name: str
    """As it is told to people: the number of the release, or the flag that is new in this one."""
    release: str
    flags: tuple[str, ...]


class BisectQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory is about: another question has another directory."""

    schema: str = QUESTION_SCHEMA
    points: tuple[Point, ...]
    settings: str
    """Model, sampling and amount of evidence, as YAML."""


class PointTried(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one point."""

    schema: str = TRIED_SCHEMA
    point: Point
    not_judged: str = ""
    """Why not; empty where there is an audit."""
    seconds: float
    packages: Mapping[str, str] = {}
    """Versions in the environment."""

    def __post_init__(self) -> None:
        """What was found stays."""
        freeze(self, "packages")


class PointLooked(msgspec.Struct, frozen=True, kw_only=True):
    """One point in the answer."""

    name: str
    says: str
    """Which end it is like, or why it could not be judged."""


class BisectAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Between which two neighbours the change lies."""

    schema: str = ANSWER_SCHEMA
    kind: ChangeKind
    before: str
    after: str
    findings: tuple[KindFound, ...]
    """Of those two, in every kind."""
    ends: tuple[KindFound, ...]
    """Of the two ends."""
    skipped: tuple[str, ...]
    """Between the two, and not to be judged: the change came with one of these, or with `after`."""
    unlike: tuple[str, ...]
    """PointLooked at, and like neither side: there is more than one change."""
    packages: Mapping[str, tuple[str, str]]
    """Versions that differ beside the engine's own, before and after: they may be what changed."""
    looked: tuple[PointLooked, ...]
    of: int
    """Points in all."""

    def __post_init__(self) -> None:
        """What was found stays."""
        freeze(self, "packages")


def open_question(directory: Path, question: BisectQuestion) -> None:
    """Write it down, or see that it is the one that is written there."""
    path = directory / QUESTION
    if path.is_file():
        if read_document(path, BisectQuestion, QUESTION_SCHEMA, "search") != question:
            raise RecordError(
                f"{directory} holds a search among other engines, or with other settings; choose another --out, or repeat "
                "that one's options to go on with it"
            )
        return
    if held := sorted(each.name for each in directory.iterdir() if each.name != LOCK):
        raise RecordError(
            f"{directory} holds other things than a search ({', '.join(held[:3])}); choose another --out"
        )
    write_document(path, question)


def place(directory: Path, number: int, point: Point) -> Path:
    """Where what is found about a point lies."""
    return directory / f"{number:03d}-{re.sub('[^A-Za-z0-9.]+', '-', point.name).strip('-')[:40]}"


def write_tried(directory: Path, tried: PointTried) -> None:
    """Last: a point without it was not looked at."""
    content = document_content(TRIED, tried)
    write_seal(directory, (), {TRIED: content}, TRIED_SEAL)
    write_atomically(directory / TRIED, content)


def read_tried(directory: Path) -> PointTried | None:
    """None where it was not looked at; refused where it was edited since."""
    if not (directory / TRIED).is_file():
        return None
    check_seal(directory, (TRIED,), TRIED_SEAL)
    return read_document(directory / TRIED, PointTried, TRIED_SCHEMA, "look")


def write_answer(directory: Path, answer: BisectAnswer) -> None:
    """What was found, for programs."""
    content = document_content(ANSWER, answer)
    write_seal(directory, (QUESTION,), {ANSWER: content}, SEAL)
    write_atomically(directory / ANSWER, content)

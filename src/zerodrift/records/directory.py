"""What a run leaves behind: one directory, the same files in every one.

config.yaml        the resolved configuration
asked.json         what was asked beyond it: the fault planted, the update made, the weights compared with
environment.json   versions and devices
rollouts.jsonl     every request and what came back
reference.jsonl    what the reference answered to the same requests, where a task rewards both
tokens.parquet     every token with both sides' numbers
verdict.json       the conclusion
case.json          the smallest request that shows the difference, where one was found
judged.jsonl       what was judged of each recorded rollout, where a dump was
seal.json          digests of what the verdict rests on: one that was edited afterwards is not believed
report.html        the same, for people
preflight.json     the checklist, where the audit was part of one (see `preflight`); preflight.html for people, and
                   preflight.seal.json, by which an edited one is known
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from zerodrift.core.errors import RecordError
from zerodrift.records.codec import write_atomically
from zerodrift.records.document import document_content, read_document
from zerodrift.records.lock import only_writer
from zerodrift.records.seal import check_seal, write_seal
from zerodrift.records.verdict import SCHEMA, Outcome, VerdictRecord

CONFIG, ENVIRONMENT, VERDICT = "config.yaml", "environment.json", "verdict.json"
ROLLOUTS, TOKENS, REPORT = "rollouts.jsonl", "tokens.parquet", "report.html"
CASE, REFERENCE = "case.json", "reference.jsonl"
ASKED = "asked.json"
LOCK = ".lock"
JUDGED = "judged.jsonl"
SEALED = (CONFIG, ASKED, ROLLOUTS, REFERENCE, TOKENS, CASE, JUDGED)
"""What a verdict rests on; environment and reports are put beside it by whoever started the run."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two runs with one configuration different ones."""

    planted: str
    """The fault; empty where the engine is as it comes."""
    sync: bool
    resets_cache: bool
    weights: str
    """Digest of the reference's."""


def check_run_directory(directory: Path) -> None:
    """It can hold a run: it is not there yet, or is empty, or holds one already."""
    if any(_held(directory)) and not (directory / CONFIG).is_file():
        raise RecordError(
            f"{directory} holds other things than a run ({CONFIG} is not among them); choose another --out"
        )
    if (directory / VERDICT).exists() and not _cut_off(directory):
        # Its answers are those of an engine as it was then: a second audit would repeat the verdict and ask nothing.
        raise RecordError(f"{directory} holds a finished run; choose another --out, or remove it first")


def _held(directory: Path) -> list[str]:
    """Names of what is in it; nothing where it is not there yet."""
    if directory.exists() and not directory.is_dir():
        raise RecordError(f"{directory} is a file; choose another --out for the run's directory")
    return [entry.name for entry in directory.iterdir()] if directory.exists() else []


def _cut_off(directory: Path) -> bool:
    """Whether it could not be judged because the engine failed: then it is no finished run."""
    record = read_verdict(directory)
    return record.verdict is Outcome.INCONCLUSIVE and any(probe.cut_off for probe in record.probes)


def check_new(directory: Path) -> None:
    """Nothing can be overwritten in it: it is not there yet, or is empty."""
    if held := sorted(name for name in _held(directory) if name != LOCK):
        raise RecordError(
            f"{directory} is not empty (it holds {', '.join(held[:3])}), and nothing is overwritten; choose another --out"
        )


@contextmanager
def new_directory(directory: Path) -> Iterator[None]:
    """Make it, and hold it for as long as it is filled: of two runs that found it empty one is refused."""
    directory.mkdir(parents=True, exist_ok=True)
    with only_writer(directory / LOCK, directory):
        check_new(directory)
        yield


def write_verdict(directory: Path, record: VerdictRecord) -> Path:
    """`verdict.json`, the last of the records, and before it the seal over all of them."""
    content = document_content(VERDICT, record)
    write_seal(directory, SEALED, {VERDICT: content})
    write_atomically(directory / VERDICT, content)
    return directory / VERDICT


def read_verdict(directory: Path, believed: Sequence[str] = (VERDICT,)) -> VerdictRecord:
    """The verdict of a finished run; refused where one of the `believed` files was altered since."""
    record = read_document(directory / VERDICT, VerdictRecord, SCHEMA, "audit")
    check_seal(directory, believed)
    return record

"""`seal.json`: digests of all that a finished run wrote, so that one that was edited afterwards is not believed.

It guards against a hand that slips and a file that was damaged, not against one who writes a new seal as well.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from zerodrift.core.errors import DigestMismatch
from zerodrift.core.frozen import freeze
from zerodrift.records.codec import write_atomically
from zerodrift.records.document import read_document

SEAL = "seal.json"
SCHEMA = "zerodrift.seal/1"


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """SHA-256 of each file by its name."""

    schema: str = SCHEMA
    files: Mapping[str, str]

    def __post_init__(self) -> None:
        """Seals do not change."""
        freeze(self, "files")


def write_seal(
    directory: Path, names: Sequence[str], about_to_be: Mapping[str, bytes], seal: str = SEAL
) -> None:
    """Seal those of `names` that are there, and files that are yet to be written with this content.

    It comes before the file that says that the run is finished: who is killed in between has no finished run.
    """
    digests = {name: _digest(directory / name) for name in names if (directory / name).is_file()}
    digests |= {name: hashlib.sha256(content).hexdigest() for name, content in about_to_be.items()}
    sealed = msgspec.json.encode(Seal(files=dict(sorted(digests.items()))))
    write_atomically(directory / seal, msgspec.json.format(sealed, indent=2) + b"\n")


def check_seal(directory: Path, names: Sequence[str], seal: str = SEAL) -> None:
    """Those of `names` are as they were when the run ended: none changed, gone or new."""
    if not (directory / seal).is_file():
        raise DigestMismatch(
            f"{directory} was altered: it has {' and '.join(names)} and no {seal}, which is written with it; run it again with another --out"
        )
    sealed = read_document(directory / seal, Seal, SCHEMA, "run").files
    now = {name: _digest(directory / name) for name in names if (directory / name).is_file()}
    if changed := sorted(name for name in names if sealed.get(name) != now.get(name)):
        raise DigestMismatch(
            f"{directory} was altered: {', '.join(changed)} {'is' if len(changed) == 1 else 'are'} not as the run left "
            f"{'it' if len(changed) == 1 else 'them'}; run it again with another --out, or put back what was there"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

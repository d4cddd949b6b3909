"""Does a change of the source change a decision? The demo's audits in two source trees, verdict.json against verdict.json.

    python tests/compare_verdicts.py OLD NEW [--fault CAUSE[:VARIANT] …]

OLD and NEW are directories with `src/`, or commits. Every scene of `zerodrift demo` is audited in both, and every --fault on the
default engine as well. What may differ is listed below; anything else is printed, and the exit status is 1.

A change that moves code is compared with its parent: an auditor that has got other probes since gives other numbers.
    b51744d 5fa210e    audit, blame and a monitor share drift/, one decide() makes the causes
    a9624fc^ a9624fc   no decision reads a sentence
    7808e7d^ 7808e7d   `says` is `message`
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from zerodrift.cli.demo import BUILT_IN, COOL, SMALL, Scene

TIMED = frozenset({"seconds"})
"""Fields that a clock decides."""
ADDED = frozenset({"follows_rounding", "retells_probe", "particular_fix"})
"""Fields that only the newer tree writes: what it had read out of sentences before."""


class Renamed(NamedTuple):
    """What newer trees call otherwise, on purpose."""

    fields: dict[str, str]
    """Old field name to new, wherever it stands."""
    words: dict[str, str]
    """Old words to new, wherever they stand in a sentence."""


RENAMED = Renamed(
    fields={"says": "message"},
    words={
        "zerodrift.verdict/1": "zerodrift.verdict/2",
        "no account brings Δ to the floor": "no explanation brings Δ to the floor",
    },
)


def scene_arguments(scene: Scene) -> list[str]:
    """What `zerodrift audit` is told for this scene."""
    settings = [f"--set={setting}" for setting in (*SMALL, *scene.settings)]
    planted = [] if scene.fault is None else ["--inject", scene.fault]
    update = ["--sync"] if scene.sync else []
    cache = [] if scene.resets_cache else ["--no-reset-cache"]
    return [*settings, *planted, *update, *cache]


def verdict(tree: Path, arguments: list[str]) -> dict[str, Any]:
    """The verdict of one audit in the source tree `tree`, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="zerodrift-compare-") as scratch:
        # A relative --out, so that commands in the verdict name no directory of this run.
        command = [sys.executable, "-m", "zerodrift.cli.main", "audit", *arguments, "--out", "run"]
        environment = {**os.environ, "PYTHONPATH": str((tree / "src").resolve())}
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, check=False
        )
        path = Path(scratch) / "run" / "verdict.json"
        if not path.exists():
            raise SystemExit(f"{tree}: no verdict from {arguments}, exit {done.returncode}\n{done.stderr}")
        found: dict[str, Any] = json.loads(path.read_bytes())
        return found


def renamed(value: Any) -> Any:
    """`value` of either tree, in the newest words."""
    if isinstance(value, dict):
        return {RENAMED.fields.get(key, key): renamed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each) for each in value]
    if isinstance(value, str):
        for old, new in RENAMED.words.items():
            value = value.replace(old, new)
    return value


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Fields that differ, with both values; both in the newest words."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new} - TIMED - (ADDED - old.keys())):
            yield from differences(old.get(key, "(absent)"), new.get(key, "(absent)"), f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif type(old) is not type(new) or old != new:
        yield f"{where}\n    old: {old}\n    new: {new}"


@contextmanager
def sources(name: str) -> Iterator[Path]:
    """The directory `name`, or the sources of the commit `name`."""
    if Path(name, "src").is_dir():
        yield Path(name)
        return
    root = Path(__file__).parents[1]
    packed = subprocess.run(
        ["git", "-C", str(root), "archive", name, "src"], capture_output=True, check=False
    )
    if packed.returncode:
        raise SystemExit(f"{name} is no directory with src/, and no commit: {packed.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="zerodrift-tree-") as directory:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(directory, filter="data")
        yield Path(directory)


def equal(scene: Scene, old: Path, new: Path) -> bool:
    """Does this audit end the same in both? What differs is printed."""
    arguments = scene_arguments(scene)
    before, after = verdict(old, arguments), verdict(new, arguments)
    found = list(differences(renamed(before), renamed(after)))
    outcome = f"{len(found)} differences" if found else "equal"
    sys.stdout.write("\n  ".join((f"{scene.planted}: {after['verdict']}, {outcome}", *found)) + "\n")
    sys.stdout.flush()
    return not found


def main() -> int:
    """Compare, print, and say by the exit status whether anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--fault", action="append", default=[], help="one more fault, as --inject takes it")
    parser.add_argument("--no-demo", action="store_true", help="only the faults named")
    options = parser.parse_args()
    scenes = [] if options.no_demo else list(BUILT_IN)
    scenes += [Scene(name, name, (COOL,), fault=name) for name in options.fault]
    with sources(options.old) as old, sources(options.new) as new:
        failures = [scene for scene in scenes if not equal(scene, old, new)]
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

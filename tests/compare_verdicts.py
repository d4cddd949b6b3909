"""Does a change of the source change a decision? The demo's audits in two source trees, verdict.json against verdict.json.

    python tests/compare_verdicts.py OLD NEW [--fault CAUSE[:VARIANT] …]

OLD and NEW are directories with `src/`. Every scene of `zerodrift demo` is audited in both, and every --fault on the
default engine as well. What may differ is listed below; anything else is printed, and the exit status is 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zerodrift.cli.demo import BUILT_IN, COOL, SMALL, Scene

TIMED = frozenset({"seconds"})
"""Fields that a clock decides."""
ADDED = frozenset({"follows_rounding", "retells_probe", "particular_fix"})
"""Fields that only the newer tree writes: what it had read out of sentences before."""


class Renamed(NamedTuple):
    """What the newer tree calls otherwise, on purpose."""

    fields: dict[str, str]
    """Old field name to new, wherever it stands."""
    words: dict[str, str]
    """Old words to new, wherever they stand in a sentence."""


RENAMED = Renamed(fields={"says": "message"}, words={"zerodrift.verdict/1": "zerodrift.verdict/2"})


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
    """`value` of the older tree, in the words of the newer one."""
    if isinstance(value, dict):
        return {RENAMED.fields.get(key, key): renamed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each) for each in value]
    if isinstance(value, str):
        for old, new in RENAMED.words.items():
            value = value.replace(old, new)
    return value


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Fields that differ, with both values; `old` in the words of the newer tree."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new} - TIMED - (ADDED - old.keys())):
            yield from differences(old.get(key, "(absent)"), new.get(key, "(absent)"), f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif type(old) is not type(new) or old != new:
        yield f"{where}\n    old: {old}\n    new: {new}"


def main() -> int:
    """Compare, print, and say by the exit status whether anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--fault", action="append", default=[], help="one more fault, as --inject takes it")
    parser.add_argument("--no-demo", action="store_true", help="only the faults named")
    options = parser.parse_args()
    scenes = [] if options.no_demo else list(BUILT_IN)
    scenes += [Scene(name, name, (COOL,), fault=name) for name in options.fault]
    failures = 0
    for scene in scenes:
        arguments = scene_arguments(scene)
        old, new = verdict(options.old, arguments), verdict(options.new, arguments)
        found = list(differences(renamed(old), new))
        failures += bool(found)
        outcome = f"{len(found)} differences" if found else "equal"
        sys.stdout.write("\n  ".join((f"{scene.planted}: {new['verdict']}, {outcome}", *found)) + "\n")
        sys.stdout.flush()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

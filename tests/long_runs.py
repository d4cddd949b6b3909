"""What takes too long for `.ci/run`: lanes, each a target of make, and when each last ran, in docs/long-runs.md.

    make long                    # every lane that has not passed with the code as it is
    make long LANE=engines-full  # one, whatever its row says
    python tests/long_runs.py --check    # warns of lanes that are a week old, failed or never ran; .ci/run does so

The page is written after each lane, so a run that is stopped goes on where it was.
"""

import argparse
import datetime
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "long-runs.md"
LANES = {
    "coverage": "branch coverage of `make test`, held by package",
    "profiles-long": "tests marked `long`: more examples, longer contexts, more memory than a change can wait for",
    "property-long": "the properties with 5,000 examples each",
    "faults-long": "forty bugs that nobody planned for, and public ones, audited",
    "faults-full": "every fault on every model, pairs of faults, healthy engines: docs/faults.md",
    "history": "public bugs re-enacted: docs/would-have-caught.md",
    "engines-full": "every test on real engines: vLLM 0.28 and 0.32, llama.cpp",
    "v0-v1": "vLLM 0.8.5 (V0) and 0.18.1 (V1), audited and compared: docs/v0-v1.md",
    "trl-vllm": "a real TRL training under watch, rollouts out of a real vLLM: docs/trl.md",
    "demo-vllm": "the demonstration on a real vLLM",
    "exam": "half A of the exam: 45 faults in a real vLLM 0.32, written blind, and healthy controls",
}
SETTINGS = ("docs/vllm.yaml", "docs/trl_vllm_run.py", "docs/v0-v1.yaml", "docs/llama-cpp.yaml")
CODE = ("src", "tests", "integrations", "engines", "constraints.txt", *SETTINGS)
"""What a lane's result depends on."""
ROWS = {
    "history": ("docs/would-have-caught.jsonl",),
    "faults-full": ("docs/faults.jsonl", "docs/tokens.jsonl", "docs/healthy.jsonl"),
}
"""Lanes that go on where they stopped, by the rows of these files: rows of other code would pass for this one's."""
BEGUN = ROOT / ".cache" / "long-runs"
OLD = datetime.timedelta(days=7)
NEVER = "never"
HEAD = "| lane | what it runs | last run | at commit | result | minutes |\n|---|---|---|---|---|---|\n"


class UnreadablePage(Exception):
    """What stands in docs/long-runs.md is not what this script writes."""


class Run(NamedTuple):
    """The last run of a lane."""

    date: datetime.date
    commit: str
    """Short; with a `+` where the code was not as committed."""
    passed: bool
    minutes: float


def read(page: str) -> dict[str, Run]:
    """The runs that the page tells of; a row that cannot be read is an error, not a lane that never ran."""
    runs = {}
    for line in page.splitlines():
        if not line.startswith("| `"):
            continue
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if len(cells) != 6 or cells[0] not in LANES:
            raise UnreadablePage(f"docs/long-runs.md has a row of no lane: {line}")
        lane, _, date, commit, result, minutes = cells
        if date == NEVER:
            continue
        if result not in ("pass", "FAIL"):
            raise UnreadablePage(f"docs/long-runs.md: {lane} is neither `pass` nor `FAIL` but {result!r}")
        try:
            runs[lane] = Run(datetime.date.fromisoformat(date), commit, result == "pass", float(minutes))
        except ValueError as error:
            raise UnreadablePage(f"docs/long-runs.md: the row of {lane}: {error}") from error
    return runs


def write(page: str, runs: Mapping[str, Run]) -> str:
    """The page with these runs in its table; what stands before the table is kept."""
    prose, found, _ = page.partition(HEAD)
    if not found:
        raise UnreadablePage("docs/long-runs.md has no table of lanes: restore it with git")
    rows = []
    for lane, what in LANES.items():
        run = runs.get(lane)
        cells = (NEVER, "", "", "")
        if run is not None:
            cells = (f"{run.date}", f"`{run.commit}`", "pass" if run.passed else "FAIL", f"{run.minutes:.1f}")
        rows.append(f"| `{lane}` | {what} | {' | '.join(cells)} |\n")
    return prose + HEAD + "".join(rows)


def warnings(runs: Mapping[str, Run], today: datetime.date) -> list[str]:
    """What is not as it should be, a line for each lane."""
    found = []
    for lane in LANES:
        run = runs.get(lane)
        if run is None:
            found.append(f"{lane} never ran: make long LANE={lane}")
        elif not run.passed:
            found.append(f"{lane} failed on {run.date} at {run.commit}: make long LANE={lane}")
        elif today - run.date > OLD:
            found.append(f"{lane} ran {(today - run.date).days} days ago: make long LANE={lane}")
    return found


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def unchanged_since(commit: str) -> bool:
    """Whether the code is that of a commit; of one that git does not know (or `+`) it is not."""
    return _git("diff", "--quiet", commit, "--", *CODE).returncode == 0


def begin_anew(lane: str, commit: str) -> None:
    """Rows of other code go, unless this very code wrote them and was stopped."""
    mark = BEGUN / lane
    if lane not in ROWS or (mark.exists() and unchanged_since(mark.read_text())):
        return
    for name in ROWS[lane]:
        (ROOT / name).unlink(missing_ok=True)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(commit)


def run_lane(lane: str) -> Run:
    commit = _git("rev-parse", "--short", "HEAD").stdout.strip()
    commit += "" if unchanged_since("HEAD") else "+"
    begin_anew(lane, commit)
    started = time.monotonic()
    passed = subprocess.run(["make", lane], cwd=ROOT, check=False).returncode == 0
    today = datetime.datetime.now(datetime.UTC).date()
    return Run(today, commit, passed, (time.monotonic() - started) / 60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("lane", nargs="?", choices=LANES, help="this one alone")
    parser.add_argument("--check", action="store_true", help="run nothing, warn of what is old")
    asked = parser.parse_args()
    runs = read(PAGE.read_text())
    if asked.check:
        for warning in warnings(runs, datetime.datetime.now(datetime.UTC).date()):
            sys.stdout.write(f"warning: {warning}\n")
        return 0
    failed = []
    for lane in [asked.lane] if asked.lane else LANES:
        last = runs.get(lane)
        if asked.lane is None and last is not None and last.passed and unchanged_since(last.commit):
            sys.stdout.write(f"{lane}: passed with this code on {last.date}\n")
            continue
        runs[lane] = run_lane(lane)
        PAGE.write_text(write(PAGE.read_text(), runs))
        sys.stdout.write(f"{lane}: {'pass' if runs[lane].passed else 'FAIL'}, {runs[lane].minutes:.1f} min\n")
        failed += [] if runs[lane].passed else [lane]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

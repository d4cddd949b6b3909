"""An engine that is killed in the middle of a weight update comes back on the old version or the new one, whole."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from zerodrift.core.version import WeightVersion
from zerodrift.weights import history
from zerodrift.weights.registry import LOG, Kind, read_log

PROGRAM = Path(__file__).with_name("updating.py")
KEPT = 2


class Engines:
    """Forks of one program, so that a kill does not cost the start of a Python."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[history.AnyEvent] = []
        self._told = 0
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._hear() == ["ready"]

    def _hear(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program ended without a word"
        return line.split()

    def do(self, *words: str) -> tuple[list[str], int]:
        """What a fork said, and how it ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        said: list[str] = []
        while (heard := self._hear())[0] != "ended":
            said += heard
        return said, int(heard[1])

    def look(self) -> str:
        """Which version serves after a restart; its weights, its tokens and what is on the disk are right."""
        (word, label, *right, kept), status = self.do("look")
        assert (word, right, status) == ("serves", ["True", "True"], 0)
        self.tell()
        version = next(
            entry.version for entry in read_log(self.directory / LOG) if entry.version.label == label
        )
        self.events.append(history.Restarted(version=version))
        self.events.append(history.Sized(what="versions on the disk", value=int(kept), cap=KEPT))
        return label

    def tell(self) -> None:
        entries = list(read_log(self.directory / LOG))
        for entry in entries[self._told :]:
            self.events.append(event_of(entry.kind, entry.version, entry.follows))
        self._told = len(entries)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def event_of(kind: Kind, version: WeightVersion, follows: str | None) -> history.AnyEvent:
    if kind is Kind.COMMITTED:
        return history.Committed(version=version)
    if kind is Kind.PUBLISHED:
        return history.Published(version=version, follows=follows, kv=None)
    return history.Dropped(label=version.label)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path / "versions")
    yield made
    made.close()


def kill_at_every_point(engines: Engines, points: dict[str, str], times: int) -> None:
    current = engines.look()
    for number, (point, serves) in enumerate(list(points.items()) * times, start=1):
        label = f"v{number}"
        said, status = engines.do("update", label, current, point)
        assert (said, status) == ([], signal.SIGKILL), point
        found = engines.look()
        assert found == {"old": current, "new": label}[serves], point
        # The answer was lost, so its trainer tries again: made already, or made now.
        said, status = engines.do("update", label, current, "none")
        expected = ["refused", "True"] if serves == "new" else ["published", label]
        assert (said, status) == (expected, 0), point
        current = label
        engines.tell()
    assert engines.look() == current
    assert history.violations(engines.events) == []


def test_a_kill_at_every_point(engines: Engines, script: Callable[[str], ModuleType]) -> None:
    kill_at_every_point(engines, script("reliability/updating").POINTS, 5)


def test_an_engine_that_is_stopped_in_an_update_keeps_it_to_itself_and_finishes_it(
    engines: Engines, script: Callable[[str], ModuleType]
) -> None:
    """By SIGSTOP, as a scheduler or a debugger stops a process: nobody else may take it for dead."""
    current = engines.look()
    for number, point in enumerate(script("reliability/updating").POINTS, start=1):
        said, status = engines.do("pause", f"v{number}", current, point)
        current = f"v{number}"
        assert (said, status) == (["stopped", "locked", "published", current], 0), point
        engines.tell()
    assert engines.look() == current
    assert history.violations(engines.events) == []


@pytest.mark.long
def test_kills_again_and_again(engines: Engines, script: Callable[[str], ModuleType]) -> None:
    kill_at_every_point(engines, script("reliability/updating").POINTS, 200)


def kill_at_one_touch_in(every: int, tmp_path: Path) -> None:
    words = [sys.executable, str(PROGRAM.with_name("killed_updates.py")), str(tmp_path), str(every)]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    *looks, (_, touches) = [line.split() for line in run.stdout.splitlines()]
    assert int(touches) > 60
    assert [look[0] for look in looks] == [str(touch) for touch in range(1, int(touches) + 1, every)]
    assert {len(look) for look in looks} == {2}, run.stdout
    assert {label for _, label in looks} >= {"v0", "v1", "v3"}


def test_a_kill_at_one_in_thirteen_touches_of_the_disk(tmp_path: Path) -> None:
    """Of an engine's life: its first start, updates, a rollback, what is forgotten, and the start after the kill."""
    kill_at_one_touch_in(13, tmp_path)


@pytest.mark.long
def test_a_kill_at_every_touch_of_the_disk(tmp_path: Path) -> None:
    kill_at_one_touch_in(1, tmp_path)


def test_half_an_update_would_be_seen(engines: Engines) -> None:
    """What the looks above are held against: weights that are not those of their label."""
    engines.look()
    said, _ = engines.do("update", "v1", "v0", "none")
    assert said == ["published", "v1"]
    log = engines.directory / LOG
    mislabelled = history.Restarted(version=WeightVersion("v0", None))
    engines.tell()
    assert [found.invariant for found in history.violations([*engines.events, mislabelled])] == ["I2"]
    log.write_bytes(log.read_bytes()[:-30])
    assert engines.do("look")[0][:2] == ["serves", "v0"]

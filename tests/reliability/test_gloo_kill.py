"""An engine in the trainer's process and one in another, over gloo: whoever is killed wherever, both serve one version."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).with_name("gloo_updating.py")
Hear = Callable[[str, str, str], dict[str, list[str]]]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Hear]:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told, heard = process.stdin, process.stdout
    assert heard.readline() == "ready\n"

    def hear(who: str, point: str, label: str) -> dict[str, list[str]]:
        """What was said of each, by verb."""
        told.write(f"{who} {point} {label}\n")
        said: dict[str, list[str]] = {"killed": [], "refused": [], "serves": []}
        while (line := heard.readline()) != "done\n":
            assert line, "the program ended without a word"
            role, verb, what = line.split()
            said[verb].append(f"{role} {what}" if verb != "serves" else what)
        return said

    yield hear
    process.kill()
    process.communicate()


def kill_at(play: Hear, points: dict[tuple[str, str], str]) -> None:
    current = "v0"
    for number, ((who, point), serves) in enumerate(points.items(), start=1):
        label = f"v{number}"
        said = play(who, point, label)
        assert said["killed"] == [f"{who} {point}"]
        current = {"old": current, "new": label}[serves]
        assert said["serves"] == [current, current], (who, point)


def test_an_update_reaches_both(play: Hear) -> None:
    said = play("nobody", "none", "v1")
    assert said == {"killed": [], "refused": [], "serves": ["v1", "v1"]}


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(("engine", "voted"), id="engine voted"),
        pytest.param(("trainer", "prepared"), id="trainer prepared", marks=pytest.mark.long),
    ],
)
def test_all_or_none_around_the_decision(
    play: Hear, script: Callable[[str], ModuleType], point: tuple[str, str]
) -> None:
    kill_at(play, {point: script("reliability/gloo_updating").POINTS[point]})


@pytest.mark.long
def test_all_or_none_wherever_one_is_killed(play: Hear, script: Callable[[str], ModuleType]) -> None:
    kill_at(play, script("reliability/gloo_updating").POINTS)

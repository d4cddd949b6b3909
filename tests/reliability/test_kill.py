"""A run that is killed, and killed again, ends as one that never was: every row once, bit for bit."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerodrift.records.baseline import read_rows
from zerodrift.records.codec import read_lines
from zerodrift.records.rollout import Rollout

PROGRAM = Path(__file__).with_name("recording.py")
ROWS = 24


class Program:
    """The program of recording.py, listened to line by line."""

    def __init__(self, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def hear(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program ended without a word"
        return line.split()

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")

    def close(self) -> None:
        """SIGKILL, as any other end would be too kind."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, Path]]:
    path = tmp_path_factory.mktemp("killed") / "base.jsonl"
    program = Program("baseline", path)
    assert program.hear() == ["ready"]
    yield program, path
    program.close()


def record(program: Program, kill_after: int | None, delay: float = 0.0) -> int | None:
    """Start one recorder; kill it after so many batches and `delay` of another. Returns new rows where it ended."""
    program.say("go")
    word, pid = program.hear()
    assert word == "pid"
    fresh, heard_at = None, time.monotonic()
    for batch in itertools.count(1):
        heard = program.hear()
        if heard[0] == "done":
            fresh = int(heard[1])
            break
        # Not seconds: 20 ms were a part of a batch on one machine and three batches on another.
        took, heard_at = time.monotonic() - heard_at, time.monotonic()
        if batch == kill_after:
            time.sleep(delay * took)
            os.kill(int(pid), signal.SIGKILL)
            break
    program.say("reap")
    while (heard := program.hear())[0] != "ended":
        # Said before the kill arrived.
        fresh = int(heard[1]) if heard[0] == "done" else fresh
    return fresh


def test_a_baseline_that_is_killed_again_and_again(recorder: tuple[Program, Path]) -> None:
    program, path = recorder
    assert record(program, None) == ROWS
    whole = path.read_bytes()
    assert [row.index for row in read_rows(path)] == list(range(ROWS))
    path.unlink()
    chance = random.Random(0)
    kills = 0
    while record(program, kill_after=2, delay=chance.random()) is None:
        kills += 1
        lines = path.read_bytes().splitlines(keepends=True)
        assert len(lines) >= 1 + 4 * kills, "a batch that was said to be on the disk is gone"
        # What a kill in the middle of a write leaves behind; to hit that moment by chance would take hours.
        with path.open("ab") as file:
            file.write(whole.splitlines(keepends=True)[len(lines) % (ROWS + 1)][: chance.randrange(1, 60)])
    assert kills >= 3
    assert path.read_bytes() == whole


def test_a_baseline_that_is_killed_while_it_writes_its_header(recorder: tuple[Program, Path]) -> None:
    program, path = recorder
    path.unlink(missing_ok=True)
    record(program, None)
    whole = path.read_bytes()
    for size in (1, whole.index(b"\n")):
        path.write_bytes(whole[:size])
        record(program, kill_after=1)
    record(program, None)
    assert path.read_bytes() == whole


def observe(path: Path, kill_after: int | None, delay: float = 0.0) -> int | None:
    """Start one observer; kill it so many batches later. Returns how many requests it said were on the disk then."""
    program = Program("observe", path)
    try:
        answered = 0
        for batch in itertools.count(1):
            heard = program.hear()
            if heard[0] == "done":
                return None
            answered = int(heard[1])
            if batch == kill_after:
                break
        time.sleep(delay)
        return answered
    finally:
        program.close()


def test_an_observation_that_is_killed_again_and_again(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain.jsonl", tmp_path / "rollouts.jsonl"
    assert observe(plain, None) is None
    samples = [1 + index % 3 for index in range(ROWS)]
    indices = [index for index in range(ROWS) for _ in range(samples[index])]
    assert [rollout.index for rollout in read_lines(plain, Rollout)] == indices
    chance = random.Random(1)
    kills = 0
    while (answered := observe(path, kill_after=2, delay=chance.uniform(0, 0.03))) is not None:
        kills += 1
        content = path.read_bytes()
        assert content.count(b"\n") >= sum(samples[:answered]), "an answer that was said to be kept is gone"
        # Cut where a kill may: within a line, or exactly between two samples of one request.
        lines = content.splitlines(keepends=True)
        path.write_bytes(content[: -chance.randrange(1, 3000)] if kills % 2 else b"".join(lines[:-1]))
    assert kills >= 3
    assert path.read_bytes() == plain.read_bytes()

"""A writer of an archive that is killed, again and again, or whose disk is full: what was acknowledged is there, once."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pyarrow.parquet
import pytest

from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.archive.writer import Archive

PROGRAM = Path(__file__).with_name("archiving.py")


@pytest.fixture(scope="module")
def archiving(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("reliability/archiving")


class Writers:
    """Forks of one program, so that a kill does not cost the start of a Python."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.acknowledged = 0
        """Steps from 0, all of them."""
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "killed", str(directory)],
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

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")

    def start(self, die_at: int = 0) -> int:
        """A writer, and its process."""
        self._say(f"go {self.acknowledged} {die_at}")
        word, pid = self._hear()
        assert word == "pid"
        return int(pid)

    def kill(self, acks: int, delay: float) -> None:
        """One writer, killed so long after so many batches were acknowledged; after none, while it opens."""
        pid = self.start()
        for _ in range(acks):
            self._take(self._hear())
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        self.end()

    def end(self) -> bool:
        """Hear the writer out; whether it came to its end."""
        self._say("reap")
        done = False
        while (heard := self._hear())[0] != "ended":
            done = done or heard[0] == "done"
            if heard[0] == "ack":
                self._take(heard)
        return done

    def _take(self, heard: list[str]) -> None:
        assert heard == ["ack", str(self.acknowledged)]
        self.acknowledged += 1

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    made = Writers(tmp_path / "archive")
    yield made
    made.close()


def check_all(archiving: ModuleType, writers: Writers) -> None:
    """By the reader, and by counting what is in the files once another writer has put them in order."""
    if not writers.acknowledged:
        return
    steps = list(range(writers.acknowledged))
    assert archiving.wrong(writers.directory, steps) == []
    reader = ArchiveReader(writers.directory)
    # A batch that was whole when the kill came is kept, though nobody was told: it is the next one to be handed in.
    assert {entry.step for entry in reader.entries()} - set(steps) <= {writers.acknowledged}
    assert list(reader.findings()) == []
    reader.close()


def test_what_is_lost_changed_or_there_twice_would_be_seen(archiving: ModuleType, tmp_path: Path) -> None:
    with Archive(tmp_path / "archive", archiving.SETTINGS) as archive:
        for step in range(3):
            archive.append(archiving.made(step))
    assert archiving.wrong(tmp_path / "archive", [0, 1, 2]) == []
    assert archiving.wrong(tmp_path / "archive", [0, 1, 2, 3]) == ["step 3 is lost"]
    with Archive(tmp_path / "archive", archiving.SETTINGS) as archive:
        changed = msgspec.structs.replace(archiving.made(2), reasons=("another",))
        archive.append(changed)
    assert archiving.wrong(tmp_path / "archive", [0, 1, 2]) == ["step 2 is lost", "1 are there twice"]


def check_files(writers: Writers) -> None:
    Archive(writers.directory).close()
    digests = [
        digest
        for path in (writers.directory / "segments").iterdir()
        for digest in set(pyarrow.parquet.read_table(path, columns=["batch"]).column("batch").to_pylist())
    ]
    assert len(digests) == len(set(digests)) >= writers.acknowledged
    assert list((writers.directory / "journals").iterdir()) == []


def kill_again_and_again(archiving: ModuleType, writers: Writers, kills: int) -> None:
    chance = random.Random(kills)
    for number in range(kills):
        writers.kill(chance.randrange(5), chance.uniform(0.0, 0.04))
        if number % 25 == 0:
            check_all(archiving, writers)
    check_all(archiving, writers)
    check_files(writers)
    assert writers.acknowledged >= kills


def test_eight_kills(archiving: ModuleType, writers: Writers) -> None:
    kill_again_and_again(archiving, writers, 8)


@pytest.mark.long
def test_two_hundred_kills(archiving: ModuleType, writers: Writers) -> None:
    kill_again_and_again(archiving, writers, 200)


def points(archiving: ModuleType, tmp_path: Path, every: int) -> int:
    """Die at each touch of the disk, or at one in so many; a second writer goes on, and dies at the same point of its own."""
    program = Writers(tmp_path / "archive")
    die_at, ended = 1, False
    while not ended:
        shutil.rmtree(program.directory, ignore_errors=True)
        program.acknowledged = 0
        program.start(die_at)
        ended = program.end()
        check_all(archiving, program)
        program.start(die_at)
        program.end()
        check_all(archiving, program)
        check_files(program)
        die_at += every
    program.close()
    return die_at


def test_a_kill_at_one_in_nine_touches_of_the_disk(archiving: ModuleType, tmp_path: Path) -> None:
    assert points(archiving, tmp_path, 9) > 60


@pytest.mark.long
def test_a_kill_at_every_touch_of_the_disk(archiving: ModuleType, tmp_path: Path) -> None:
    assert points(archiving, tmp_path, 1) > 60


def heard_of_a_full_disk(*before: str, directory: Path, **options: object) -> list[str]:
    words = [*before, sys.executable, str(PROGRAM), "full", str(directory)]
    run = subprocess.run(words, capture_output=True, text=True, check=True, **options)  # type: ignore[call-overload]
    heard: list[str] = run.stdout.split()
    return heard


@pytest.mark.parametrize("kib", [800, 900, 1000])
def test_a_full_disk(tmp_path: Path, kib: int) -> None:
    """In a mount of its own, which nobody else sees and which goes with the process."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this system lets nobody mount a small disk")
    mounted = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        f'mount -t tmpfs -o size={kib}k tmpfs "$0" && exec "$@"',
        str(tmp_path),
    ]
    word, refused, *problems = heard_of_a_full_disk(*mounted, directory=tmp_path)
    assert (word, problems) == ("refused", [])
    assert int(refused) > 3


def test_a_file_that_may_not_grow(tmp_path: Path, archiving: ModuleType) -> None:
    limit = archiving.SETTINGS.segment_bytes // 2
    program = (
        "import resource, sys, pathlib; sys.path.insert(0, sys.argv[1]); import archiving\n"
        "from zerodrift.core.errors import ArchiveFull\n"
        "archive = archiving.Archive(pathlib.Path(sys.argv[2]), archiving.SETTINGS)\n"
        f"archive.append(archiving.made(0)); resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "for step in range(1, 9):\n"
        "    try: archive.append(archiving.made(step)); print(step)\n"
        "    except ArchiveFull: print('full'); break\n"
        "sys.stdout.flush()\n"
    )
    words = [sys.executable, "-c", program, str(PROGRAM.parent), str(tmp_path / "archive")]
    heard = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    assert heard[-1] == "full"
    assert archiving.wrong(tmp_path / "archive", [0, *map(int, heard[:-1])]) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != limit

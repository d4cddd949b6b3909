"""A writer of an archive, to be killed or to run out of disk: `archiving.py killed DIR` or `archiving.py full DIR`.

`killed` forks a writer for every line `go FIRST DIE_AT` on its stdin; the writer says its pid, then a line for every batch that
was acknowledged. With DIE_AT above 0 it kills itself right before it touches the disk for that many'th time, half-way where
that is a write. `full` fills a disk until it is refused, makes room, and goes on; it says what was wrong, or nothing.
"""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zerodrift.core.errors import ArchiveFull
from zerodrift.records.archive.index import Index
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState, version_spans
from zerodrift.records.arrow import arrow

SETTINGS = ArchiveSettings(healthy_one_in=1, segment_bytes=12 * 1024)
"""Small enough that every third batch is sealed away."""
STATES = (BatchState.OK, BatchState.OK, BatchState.QUARANTINE)
TOUCHES = ("write", "fsync", "replace", "unlink", "truncate", "ftruncate")


def made(step: int) -> ArchivedBatch:
    """A function of the step: whoever reads it back can make it again."""
    chance = random.Random(step)
    rollouts = []
    for index in range(2):
        length = chance.randrange(40, 120)
        logprobs = tuple(-chance.expovariate(1.0) for _ in range(length))
        rollouts.append(
            ArchivedRollout(
                id=f"{step}/{index}",
                prompt_token_ids=tuple(chance.randrange(500) for _ in range(9)),
                token_ids=tuple(chance.randrange(500) for _ in range(length)),
                behavior_logprobs=logprobs,
                old_logprobs=tuple(value - 0.01 for value in logprobs),
                versions=version_spans([step] * length),
                reward=chance.random(),
            )
        )
    return ArchivedBatch(step=step, state=STATES[step % len(STATES)], rollouts=tuple(rollouts))


def say(*words: object) -> None:
    # No print: ours is read by a program, line by line.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def dying_at(die_at: int) -> None:
    """From here on the disk can be touched so many times."""
    touched = 0

    def counted(name: str, touch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal touched
            if name == "write" and arguments[0] == 1:
                return touch(*arguments)
            touched += 1
            if touched == die_at:
                if name == "write":
                    touch(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return touch(*arguments, **named)

        return call

    for name in TOUCHES:
        setattr(os, name, counted(name, getattr(os, name)))
    commit = counted("commit", lambda: None)
    whole = Index.transaction

    @contextmanager
    def transaction(index: Index) -> Iterator[None]:
        with whole(index):
            yield
            commit()
        commit()

    Index.transaction = transaction  # type: ignore[method-assign]


def write(directory: Path, first: int, die_at: int) -> None:
    """Batches from `first` on: for ever, or nine of them where the writer is to die by itself."""
    if die_at:
        dying_at(die_at)
    archive = Archive(directory, SETTINGS)
    step = first
    while not die_at or step < first + 9:
        archive.append(made(step))
        say("ack", step)
        step += 1
    archive.close()
    say("done", step)


def killed(directory: Path) -> None:
    arrow("an archive")
    say("ready")
    for line in sys.stdin:
        _, first, die_at = line.split()
        child = os.fork()
        if child == 0:
            say("pid", os.getpid())
            write(directory, int(first), int(die_at))
            os._exit(0)
        # Reaped when told so: until then its number cannot become that of another process, and may be killed.
        sys.stdin.readline()
        os.waitpid(child, 0)
        say("ended")


def wrong(directory: Path, acknowledged: list[int]) -> list[str]:
    """What a reader does not find as it was acknowledged."""
    reader = ArchiveReader(directory)
    batches = [reader.read(entry) for entry in reader.entries()]
    reader.close()
    found = {batch.step: batch for batch in batches}
    lost = [step for step in acknowledged if found.get(step) != made(step)]
    twice = len(batches) - len(found)
    return [*(f"step {step} is lost" for step in lost), *([f"{twice} are there twice"] if twice else [])]


def full(directory: Path) -> None:
    """`directory` is on a disk of its own, which is half full of something else."""
    ballast = directory / "ballast"
    disk = os.statvfs(directory)
    ballast.write_bytes(b"x" * (disk.f_bavail * disk.f_frsize // 2))
    acknowledged: list[int] = []
    archive = Archive(directory / "archive", SETTINGS)
    step = 0
    with suppress(ArchiveFull):
        while True:
            archive.append(made(step))
            acknowledged.append(step)
            step += 1
    problems = wrong(directory / "archive", acknowledged)
    ballast.unlink()
    for late in range(step, step + 6):
        archive.append(made(late))
        acknowledged.append(late)
    archive.close()
    problems += wrong(directory / "archive", acknowledged)
    say("refused", step, *problems)


if __name__ == "__main__":
    {"killed": killed, "full": full}[sys.argv[1]](Path(sys.argv[2]))

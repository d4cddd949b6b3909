"""Updates that are killed at each touch of the disk: `killed_updates.py DIR EVERY`.

Forks an engine that is started over an empty directory, takes two updates, goes back, and takes another, and that dies by SIGKILL
right before it touches the disk for the first time, then for the second time and so on (in the middle, where that is a write;
EVERY: at one touch in so many). A second one is started over what is left, and dies at the same touch of its own. A third looks:
which version serves, and which promises are broken. Says `TOUCH LABEL`, and what was wrong.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from full_updates import published
from updating import FIRST, broken_promises, loop_of, say

from zerodrift.engine.updates import Updates
from zerodrift.weights.digest import model_digest

RETAIN = 2
TOUCHES = ("write", "fsync", "rename", "mkdir", "unlink", "rmdir", "ftruncate")
ACTS: tuple[str, ...] = (FIRST, "v1", "v2", "back", "v3")
SERVES = (FIRST, "v1", "v2", "v1", "v3")
"""After each of them."""


def dying_at(die_at: int) -> None:
    """From here on the disk can be touched so many times."""
    touched = 0

    def counted(name: str, touch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal touched
            if name == "write" and given[0] <= 2:
                return touch(*given)
            touched += 1
            if touched == die_at:
                if name == "write":
                    touch(given[0], given[1][: len(given[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return touch(*given, **named)

        return call

    for name in TOUCHES:
        setattr(os, name, counted(name, getattr(os, name)))


def live(directory: Path, die_at: int, heard: int) -> None:
    """All acts, each told of when it is done."""
    dying_at(die_at)
    with Updates(loop_of(FIRST), directory, retain=RETAIN) as updates:
        os.write(heard, b".")
        for act in ACTS[1:]:
            if act == "back":
                updates.rollback(updates.current)
            else:
                published(updates, act)
            os.write(heard, b".")


def started_again(directory: Path, die_at: int, _: int) -> None:
    """Only that, and no further."""
    dying_at(die_at)
    Updates(loop_of(FIRST), directory, retain=RETAIN).close()


def look(directory: Path, touch: int, done: int) -> None:
    """What serves is what the last act that was told of left, or what the next one was to bring."""
    with Updates(loop_of(FIRST), directory, retain=RETAIN) as updates:
        label, digest = updates.current.label, updates.current.digest
        wrong = [repr(each) for each in broken_promises(updates._loop, updates, directory, RETAIN)]
        if label not in SERVES[max(done - 1, 0) : done + 1]:
            wrong.append(f"{label} serves after {done} acts")
        if (
            not digest
            == model_digest(updates._loop.engine.model)
            == model_digest(loop_of(label).engine.model)
        ):
            wrong.append(f"weights are not those of {label}")
        say(touch, label, *wrong)


def forked(work: Callable[..., None], *given: Any) -> bool:
    """Whether it came to its end."""
    if (child := os.fork()) == 0:
        try:
            work(*given)
        finally:
            os._exit(0)
    return not os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(root: Path, every: int) -> None:
    torch.set_num_threads(1)
    die_at, ended = 1, False
    while not ended:
        directory = root / str(die_at)
        hear, heard = os.pipe()
        ended = forked(live, directory, die_at, heard)
        os.close(heard)
        done = len(os.read(hear, 100))
        os.close(hear)
        forked(started_again, directory, die_at, 0)
        forked(look, directory, die_at, done)
        die_at += every
    say("ended", die_at - every)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

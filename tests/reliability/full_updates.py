"""Updates on a disk that is full: `full_updates.py DIR`, where DIR is a small disk of its own.

Leaves room for no page of 4 KiB, for one, for two and so on, and each time publishes a version, which is refused somewhere: in
the middle of its weights, of its manifest, of a line of the log. After each refusal every promise is looked at, and so is an
engine that is started anew over the same disk. Says `PAGES refused CODE` or `PAGES published`, and what was wrong.
"""

import os
import sys
from pathlib import Path

import torch
from updating import FIRST, broken_promises, loop_of, model_of, say

from zerodrift.core.errors import ZerodriftError
from zerodrift.engine.updates import Updates
from zerodrift.weights.digest import checkpoint_state, model_digest
from zerodrift.weights.of_model import update_of

PAGE = 4096
RETAIN = 2
MOST_PAGES = 200


def published(updates: Updates, label: str) -> str:
    """`published`, or what it was refused with."""
    model = model_of(label)
    try:
        with updates.begin(update_of(model, label), updates.current) as update:
            for name, tensor in checkpoint_state(model).items():
                update.push(name, tensor)
            update.verify()
            update.commit()
            update.publish()
    except ZerodriftError as error:
        return f"refused {error.code}"
    return "published"


def leave(directory: Path, pages: int) -> None:
    """Fill the disk but for so many pages."""
    ballast = directory / "ballast"
    ballast.unlink(missing_ok=True)
    disk = os.statvfs(directory)
    ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - pages * PAGE))


def wrong(directory: Path, updates: Updates, serves: str) -> list[str]:
    """Promises that are not kept, here and by an engine that is started now."""
    found = [repr(each) for each in broken_promises(updates._loop, updates, directory, RETAIN + 1)]
    if updates.current.label != serves or model_digest(updates._loop.engine.model) != updates.current.digest:
        found.append(f"{updates.current.label} serves, and not {serves}")
    return found


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    versions, serves, outcome, number = directory / "versions", FIRST, "", 0
    Updates(loop_of(FIRST), versions, retain=RETAIN).close()
    while outcome != "published" and number < MOST_PAGES:
        leave(directory, number)
        number += 1
        with Updates(loop_of(FIRST), versions, retain=RETAIN) as updates:
            outcome = published(updates, f"v{number}")
            serves = f"v{number}" if outcome == "published" else serves
            say(number - 1, outcome, *wrong(versions, updates, serves))
        with Updates(loop_of(FIRST), versions, retain=RETAIN) as again:
            for problem in wrong(versions, again, serves):
                say("restarted", problem)
    (directory / "ballast").unlink()
    with Updates(loop_of(FIRST), versions, retain=RETAIN) as updates:
        say("room", published(updates, "v999"), *wrong(versions, updates, "v999"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

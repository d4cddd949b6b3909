"""A disk that is full in the middle of an update: refused, wherever it was, and the old version serves on."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("full_updates.py")
ROOT = Path(__file__).parents[2]
KIB = 600
MOUNT = f'mount -t tmpfs -o size={KIB}k tmpfs "$0" && exec "$@"'


def test_a_disk_that_is_full_at_every_page_of_an_update(tmp_path: Path) -> None:
    """In a mount of its own, which nobody else sees and which goes with the process."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this system lets nobody mount a small disk")
    words = ["unshare", "-rm", "sh", "-c", MOUNT, str(tmp_path), sys.executable, str(PROGRAM), str(tmp_path)]
    run = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    *refused, published, room = [line.split(maxsplit=1) for line in run.stdout.splitlines()]
    assert [said for _, said in refused] == ["refused record/full"] * len(refused)
    assert [int(pages) for pages, _ in refused] == list(range(len(refused)))
    assert len(refused) > 10, "the weights alone are so many pages"
    assert (published, room) == ([str(len(refused)), "published"], ["room", "published"])

"""Whether anybody still writes what a page shows: a training that ended, one that was killed, one that goes on."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from tests.unit.view.live.conftest import observe

from zerodrift.core.errors import ArchiveLocked
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.writer import Writer, writer_of
from zerodrift.records import lock
from zerodrift.view.live.feed import Feed

WRITES = """
import sys, time
from zerodrift.monitor.monitor import Monitor
monitor = Monitor(directory=sys.argv[1])
monitor.log_step(0, kl_estimate=1e-4)
print("judged", flush=True)
time.sleep(600)
"""


def told(directory):
    feed = Feed(directory)
    feed.poll()
    feed.poll_writer()
    found = feed.status()["writer"]
    feed.close()
    return found


def test_a_training_that_goes_on_and_one_that_ended(tmp_path):
    monitor = Monitor(directory=tmp_path)
    observe(monitor, 0)
    assert told(tmp_path) == Writer.WRITING
    monitor.end()
    assert told(tmp_path) == Writer.ENDED, "its trainer said so, and its process lives on"
    observe(monitor, 1)
    assert told(tmp_path) == Writer.WRITING, "it was trained further"
    monitor.close()
    assert told(tmp_path) == Writer.ENDED
    again = Monitor(directory=tmp_path)
    assert told(tmp_path) == Writer.WRITING
    monitor.close()
    monitor.end()
    assert told(tmp_path) == Writer.WRITING, "one that was closed has no say any more"
    again.close()


def test_one_that_was_killed_has_stopped(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"judged\n"
        assert told(tmp_path) == Writer.WRITING
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert told(tmp_path) == Writer.STOPPED


def test_where_nothing_tells_nothing_is_said(tmp_path, monkeypatch):
    (tmp_path / "steps.jsonl").touch()
    assert told(tmp_path) is None, "a sink's file has no lock"
    (tmp_path / ".lock").touch()
    assert told(tmp_path) == Writer.STOPPED

    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    assert told(tmp_path) is None


def test_asking_keeps_no_monitor_out(tmp_path):
    """It has the lock, shared, while it asks."""
    (tmp_path / ".lock").touch()
    ends = threading.Event()

    def ask():
        while not ends.is_set():
            writer_of(tmp_path)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(20):
            Monitor(directory=tmp_path).close()
    finally:
        ends.set()
        asking.join()


def test_a_second_monitor_is_refused_all_the_same(tmp_path):
    first, began = Monitor(directory=tmp_path), time.monotonic()
    with pytest.raises(ArchiveLocked):
        Monitor(directory=tmp_path)
    assert time.monotonic() - began >= lock.ASKED_S
    assert told(tmp_path) == Writer.WRITING
    first.close()


def test_an_end_that_cannot_be_written_stops_no_training(tmp_path, monkeypatch):
    monitor = Monitor(directory=tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.touch", full)
    monitor.close()
    assert told(tmp_path) == Writer.STOPPED


def test_a_page_hears_of_the_end(tmp_path):
    monitor = Monitor(directory=tmp_path)
    observe(monitor, 0)
    feed = Feed(tmp_path)
    feed.start()
    deadline = time.monotonic() + 60
    for expected in (Writer.WRITING, Writer.ENDED):
        while feed.status()["writer"] != expected:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        monitor.close()
    feed.close()

import os
import sys
from typing import TextIO

import pytest

from zerodrift.cli.bar import Bar


def use(bar: Bar) -> None:
    with bar:
        bar.stage("load")
        bar.stage("record")
        bar.step(3, 12)


def test_a_log_file_gets_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    use(Bar())
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> TextIO:
    """A pseudo-terminal in the place of stderr; what is drawn can be read from its other end."""
    master, slave = os.openpty()
    stderr = os.fdopen(slave, "w")
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    reader = os.fdopen(master, "r", encoding="utf-8", newline="")
    yield reader
    stderr.close()
    reader.close()


def test_a_terminal_sees_the_stage_and_how_far_it_is(terminal: TextIO) -> None:
    use(Bar())
    sys.stderr.flush()
    drawn = os.read(terminal.fileno(), 100_000).decode()
    assert "record" in drawn
    assert "3/12" in drawn


def test_an_error_passes_through_and_ends_the_bar(capfd: pytest.CaptureFixture[str]) -> None:
    bar = Bar()
    with pytest.raises(ZeroDivisionError), bar:
        bar.stage("load")
        raise ZeroDivisionError
    assert bar._bar.live.is_started is False
    assert capfd.readouterr() == ("", "")

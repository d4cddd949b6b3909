import contextlib
import io
import sys

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


class Terminal(io.StringIO):
    """Stands for stderr where somebody watches."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_stage_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    use(Bar())
    assert "record" in terminal.getvalue()
    assert "3/12" in terminal.getvalue()


def test_an_error_ends_the_bar() -> None:
    bar = Bar()
    with contextlib.suppress(ZeroDivisionError), bar:
        raise ZeroDivisionError
    assert bar._bar.live.is_started is False

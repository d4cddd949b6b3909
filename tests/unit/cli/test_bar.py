import contextlib
import io
import sys
import time

from zerodrift.cli.bar import Bar, import_shown


def use(bar: Bar) -> None:
    with bar:
        bar.stage("load")
        bar.stage("record")
        bar.step(3, 12)


def test_a_log_file_gets_a_line_where_it_takes_long(monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    bar = Bar()
    for done, now[0] in ((1, 29.0), (684, 31.0), (700, 40.0), (2000, 62.0)):
        bar.stage("sample")
        bar.step(done, 2000)
    assert capfd.readouterr().err.splitlines() == ["note: running: sample"] * 2
    now[0] = 100.0
    bar.step(684, 2000)
    assert (
        capfd.readouterr().err == f"note: running: {bar.place}\n" == "note: running: sample, 684 of 2,000\n"
    )


def test_a_short_run_writes_nothing_into_a_log(capfd):
    use(Bar())
    assert capfd.readouterr() == ("", "")


class Terminal(io.StringIO):
    """Stands for stderr where somebody watches."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_stage_and_how_far_it_is(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    use(Bar())
    assert "record" in terminal.getvalue()
    assert "3/12" in terminal.getvalue()
    assert "/?" not in terminal.getvalue()


def test_a_long_import_is_no_empty_screen(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    import_shown("json")
    assert "start" in terminal.getvalue()


def test_which_of_several_runs_it_is(monkeypatch, capfd):
    bar = Bar()
    bar.part = "2/4 "
    bar.stage("sample")
    bar.step(1, 3)
    assert bar.place == "2/4 sample, 1 of 3"


def test_an_error_ends_the_bar():
    bar = Bar()
    with contextlib.suppress(ZeroDivisionError), bar:
        raise ZeroDivisionError
    assert bar._bar.live.is_started is False

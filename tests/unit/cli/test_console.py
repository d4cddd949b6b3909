import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest

from zerodrift.cli import console


def test_answers_are_written_as_they_are(capsys):
    text = "[bold]" + "x " * 100
    console.say(text)
    assert capsys.readouterr().out == text + "\n"


def test_trouble_keeps_the_lines_of_a_log(capsys):
    console.complain("engine/failed", "it ended:\n  line 1 [x]\n  line 2\n")
    assert capsys.readouterr().err == "error [engine/failed] it ended:\n  line 1 [x]\n  line 2\n"


def test_on_a_terminal_trouble_is_wrapped_at_words():
    code = "from zerodrift.cli.console import complain; complain('some/code', 'word ' * 40)"
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}  # 80 columns, no colours
    subprocess.run([sys.executable, "-c", code], stderr=slave, env=environment, check=True)
    os.close(slave)
    lines = os.read(master, 10_000).decode().replace("\r", "").splitlines()
    os.close(master)
    assert len(lines) == 3
    assert all(len(line) <= 80 for line in lines)
    # No word is cut: wrapping undone, the message is back.
    assert " ".join(" ".join(lines).split()).endswith(" ".join(["word"] * 40))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("zerodrift train --out runs/x --resume", "zerodrift train --out runs/x --resume to go on"),
        ("", "repeat the same command to go on"),
    ],
)
def test_a_run_that_is_stopped_says_what_goes_on_with_it(command, told, tmp_path, capsys):
    with (
        pytest.raises(SystemExit),
        console.resumable(
            SimpleNamespace(place="train, 7 of 40"), tmp_path, named=True, command=lambda: command
        ),
    ):
        raise SystemExit(143)
    assert f"stopped at train, 7 of 40; {told}" in capsys.readouterr().err.replace("\n", " ")


def test_a_closed_output_is_nobody_who_reads():
    """As under a daemon: Python has no standard output then."""
    code = "from zerodrift.cli.main import main; main()"
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "{code}" doctor "vllm serve Q" --json >&-'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")

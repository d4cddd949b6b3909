import os
import pty
import subprocess
import sys

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

import re
import runpy
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer
from typer.core import TyperGroup

from zerodrift import __version__
from zerodrift.cli.main import COMMANDS, app, main, make_app
from zerodrift.core.errors import ConfigError, EngineUnreachable, MissingExtra


def fails_as(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        """Fail on purpose."""
        raise error

    return command


COMMANDS_HERE: dict[str, Callable[..., None]] = {
    "config": fails_as(ConfigError("engine.block_size is 'x' [sic]; write a number")),
    "engine": fails_as(EngineUnreachable("nobody answers")),
    "bug": fails_as(ZeroDivisionError("one by none")),
    "interrupt": fails_as(KeyboardInterrupt()),
    "works": lambda: None,
    "lacks-torch": fails_as(ModuleNotFoundError("No module named 'torch'", name="torch")),
    "lacks-ours": fails_as(
        ModuleNotFoundError("No module named 'zerodrift.nowhere'", name="zerodrift.nowhere")
    ),
    "lacks-memory": fails_as(MemoryError()),
}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments), make_app(COMMANDS_HERE))
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("works", 0),
        ("config", 2),
        ("engine", 3),
        ("bug", 70),
        ("interrupt", 130),
        ("no-such", 2),
        ("lacks-ours", 70),
    ],
)
def test_exit_codes(command, code):
    assert run(command) == code


@pytest.mark.parametrize(("command", "told"), [("config", "config/invalid"), ("bug", "internal")])
def test_an_error_is_one_line_with_its_code_and_debug_adds_the_traceback(command, told, capsys):
    code = run(command)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error [{told}] ")
    assert err.count("\n") == 1
    assert "[sic]" in err or "--debug" in err
    assert run("--debug", command) == code
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "--debug" not in err.splitlines()[-1]


def test_the_file_itself_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerodrift", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_path(main.__code__.co_filename, run_name="__main__")
    assert capsys.readouterr().out == f"zerodrift {__version__}\n"


def paths(command: object, *above: str) -> list[tuple[str, ...]]:
    """Every command that does something, as the words that call it."""
    if not isinstance(command, TyperGroup):
        return [above]
    own = [above] if command.invoke_without_command else []
    return own + [path for verb, below in command.commands.items() for path in paths(below, *above, verb)]


PATHS = paths(typer.main.get_command(app))


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command_in_order(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    listed = re.findall(r"^│ ([a-z]+)  ", capsys.readouterr().out, re.MULTILINE)
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("path", [(), *PATHS], ids=" ".join)
def test_help_of_every_command_teaches_by_examples_that_exist(path, capsys):
    with pytest.raises(SystemExit):
        main([*path, "--help"])
    out = capsys.readouterr().out
    assert f"$ zerodrift {' '.join(path)}" in out
    for example in re.findall(r"\$ zerodrift (\S+)(?: (\S+))?", out):
        assert example[:1] in PATHS or example in PATHS


def test_without_torch_the_extra_is_named(capsys):
    assert run("lacks-torch") == MissingExtra.exit_code
    told = capsys.readouterr().err
    assert MissingExtra.code in told
    assert "zerodrift[local]" in told


@pytest.mark.parametrize("way", ["say", "table", "held back"])
@pytest.mark.parametrize("code", [0, 3])
def test_a_reader_that_has_seen_enough_changes_no_verdict(way, code):
    """`zerodrift audit | head -1` of a PASS exited with 1, which says FAIL."""
    script = """
import sys, typer
from zerodrift.cli import console
from zerodrift.cli.main import main, make_app

def verdict() -> None:
    if sys.argv[1] == "table":
        for _ in range(2000): console.stdout().print("PASS" * 20)
    elif sys.argv[1] == "say":
        for _ in range(2000): console.say("PASS" * 20)
    else:
        sys.stdin.read()
        console.say("PASS")
    raise typer.Exit(int(sys.argv[2]))

main(["verdict"], make_app({"verdict": verdict, "other": verdict}))
"""
    command = [sys.executable, "-c", script, way, str(code)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        told = process.stderr.read()
    assert (process.returncode, told) == (code, b"")


@pytest.mark.parametrize(
    "verb", [*COMMANDS, "audit ls", "audit diff", "baseline record", "archive show", "archive gradient"]
)
def test_help_is_whole_on_a_terminal_of_80_columns(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help"])
    lines = [line.rstrip(" │") for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("…") or re.search(r"--[\w-]*…", line)], "cut off"

"""Launching and ending a server process, with a small script in the place of the engine's interpreter."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerodrift.backends import launch
from zerodrift.backends.registry import check_engine
from zerodrift.backends.vllm_launch import launch_vllm
from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import ConfigError, EngineError


def alive(pid):
    """Whether a process still runs; a zombie that nobody reaps does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def gone(pid):
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def logged(log, word):
    return [line.split(" ", 1)[1] for line in log.read_text().splitlines() if line.startswith(f"{word} ")]


def child_of(log):
    return int(logged(log, "child")[0])


def start(python, log, **options):
    return launch_vllm(python, "a-model", options.pop("args", []), options.pop("env", {}), log, **options)


def test_the_server_and_its_children_are_gone_after_the_with(interpreter, tmp_path):
    log = tmp_path / "logs" / "server.log"

    with start(interpreter(), log, args=["--dtype", "float32"]) as server:
        pid, child = server.pid, child_of(log)
        assert alive(pid)
        assert alive(child)
        assert not server.exited()

    assert gone(pid)
    assert gone(child)
    assert server.exited()
    port = server.url.rsplit(":", 1)[1]
    assert logged(log, "command") == [
        f"-m vllm.entrypoints.openai.api_server --model a-model --host 127.0.0.1 --port {port} --dtype float32"
    ]


def test_the_environment_is_what_is_written_down(interpreter, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("EDITOR_OF_THE_USER", "ed")
    log = tmp_path / "server.log"

    start(interpreter(), log, env={"VLLM_CPU_KVCACHE_SPACE": "2", "EXTRA": "x"}).stop()

    seen = dict(line.split(" ", 1) for line in logged(log, "env") if " " in line)
    assert "VLLM_BATCH_INVARIANT" not in seen
    assert "PYTHONPATH" not in seen
    assert seen["EDITOR_OF_THE_USER"] == "ed"
    assert seen["EXTRA"] == "x"
    assert seen["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert seen["HF_HUB_OFFLINE"] == seen["VLLM_NO_USAGE_STATS"] == seen["DO_NOT_TRACK"] == "1"
    assert seen["VLLM_CACHE_ROOT"] == str(tmp_path / ".cache" / "vllm")


def test_stopping_twice_is_fine(interpreter, tmp_path):
    server = start(interpreter(), tmp_path / "log")
    server.stop()
    server.stop()

    assert server.exited()


def test_a_server_that_ignores_the_request_to_end_is_ended(interpreter, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "STOP_PATIENCE_S", 0.3)
    log = tmp_path / "log"

    server = start(interpreter("signal.signal(signal.SIGTERM, signal.SIG_IGN)"), log)
    server.stop()

    assert gone(server.pid)
    assert gone(child_of(log))


def test_a_server_that_dies_at_start_shows_its_last_words(interpreter, tmp_path):
    log = tmp_path / "log"
    body = "print('\\n'.join(f'line {i}' for i in range(100)))\nsys.exit('no such model')"

    with pytest.raises(EngineError, match="no such model") as caught:
        start(interpreter(body), log)

    assert "line 99" in str(caught.value)
    assert "line 9\n" not in str(caught.value)
    assert gone(child_of(log))


def test_a_server_that_dies_later_is_stopped_all_the_same(interpreter, tmp_path):
    log = tmp_path / "log"
    told = tmp_path / "die"
    body = f"""
import threading

def die_when_told():
    while not os.path.exists({str(told)!r}):
        time.sleep(0.02)
    os._exit(3)

threading.Thread(target=die_when_told, daemon=True).start()
"""

    with start(interpreter(body), log) as server:
        told.touch()
        deadline = time.monotonic() + 30
        while not server.exited() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.exited()
        assert alive(child_of(log))

    assert gone(child_of(log))


def test_a_server_that_never_answers_is_given_up(interpreter, tmp_path):
    log = tmp_path / "log"

    with pytest.raises(EngineError, match=r"1\.5") as caught:
        start(interpreter("print('thinking', flush=True)\ntime.sleep(60)"), log, timeout_s=1.5)

    assert "thinking" in str(caught.value)
    assert gone(child_of(log))


def test_an_interpreter_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(EngineError, match="engines/install"):
        start(tmp_path / "nowhere" / "python", tmp_path / "log")


def test_a_process_that_forgets_its_server_takes_it_along(interpreter, tmp_path):
    log = tmp_path / "log"
    program = (
        "import sys; from pathlib import Path; from zerodrift.backends.vllm_launch import launch_vllm\n"
        "server = launch_vllm(sys.argv[1], 'm', [], {}, Path(sys.argv[2]))\n"
        "print(server.pid)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(interpreter()), str(log)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "DEBUG"},
    )

    assert gone(int(done.stdout))
    assert gone(child_of(log))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_a_command_that_is_told_to_end_takes_its_server_along(interpreter, tmp_path, number):
    """As a job is that runs out of time, or whose terminal is closed."""
    python, run = interpreter("time.sleep(120)"), tmp_path / "run"
    command = [sys.executable, "-m", "zerodrift.cli.main", "audit", "--engine", "vllm", "--out", str(run)]
    with subprocess.Popen([*command, "--set", f"engine.python={python}"], stderr=subprocess.PIPE) as audit:
        try:
            log = _appears(run, "*.log", lambda text: "child" in text)
            audit.send_signal(number)
            told = audit.communicate(timeout=30)[1].decode()
        finally:
            audit.kill()
    assert audit.returncode == 128 + number
    assert "interrupted" in told
    assert gone(child_of(log))


def _appears(directory, pattern, wanted):
    """The file below `directory` whose text is as wanted, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in directory.rglob(pattern):
            if wanted(path.read_text()):
                return path
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} in {directory}")


def test_an_engine_that_nobody_can_reach_names_the_keys_of_a_file():
    """A command that reads a file has no option for the address."""
    with pytest.raises(ConfigError) as refused:
        check_engine(EngineConfig(name="vllm"))
    assert "engine.url" in str(refused.value)
    assert "engine.python" in str(refused.value)

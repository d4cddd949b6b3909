"""How is a server started in its own environment, and made sure to be gone afterwards?

The server gets a process group of its own and a free port on loopback; whatever happens here, that group, and nothing
else, is ended.
"""

import atexit
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from zerodrift.backends.http import HttpClient, RefusalAdvice
from zerodrift.backends.server_log import why
from zerodrift.core.errors import EngineError, EngineUnreachable

STOP_PATIENCE_S = 15.0
"""vLLM needs 2 to 5 s to end its engine and worker processes in order."""
LOG_LINES_SHOWN = 30


class LaunchedProcess:
    """A process of ours, leader of its own group. Use it in a `with`, or call `stop`; at exit it is stopped anyway."""

    def __init__(self, process: "subprocess.Popen[bytes]", log_path: Path) -> None:
        self.log_path = log_path
        self._process = process
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def exited(self) -> bool:
        """Whether the process has ended. It is not reaped, so its group's number cannot become another's."""
        if self._process.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, flags) is not None

    def stop(self) -> None:
        """Ask the group to end, then end it. Safe to call twice."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_PATIENCE_S
            while not self.exited() and time.monotonic() < deadline:
                time.sleep(0.05)
            # Even a server that went quietly may have left workers behind.
            self._signal(signal.SIGKILL)
            self._process.wait()
        atexit.unregister(self.stop)

    def last_lines(self) -> str:
        """The end of the log, for an error message."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _signal(self, number: signal.Signals) -> None:
        # The leader is not reaped yet, so the group still exists, and is still ours.
        os.killpg(self._process.pid, number)


class LaunchedServer(LaunchedProcess):
    """A process that answers at `url`."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, log_path: Path) -> None:
        super().__init__(process, log_path)
        self.url = url
        self.advice = RefusalAdvice(log=partial(why, log_path))
        """For whoever asks this server: what it writes where it fails is at hand."""


def launch(
    command: Sequence[str], env: Mapping[str, str], port: int, log_path: Path, timeout_s: float
) -> LaunchedServer:
    """Run `command` with exactly `env`, and return once it answers at `port` of loopback."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise EngineError(
            f"{command[0]} cannot be started ({error}); install the engine with engines/install, "
            "or give the interpreter of the environment that holds it"
        ) from error
    server = LaunchedServer(process, f"http://127.0.0.1:{port}", log_path)
    try:
        _wait_until_healthy(server, timeout_s)
    except BaseException:
        server.stop()
        raise
    return server


def _wait_until_healthy(server: LaunchedServer, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    client = HttpClient(server.url, timeout_s=5.0)
    try:
        while time.monotonic() < deadline:
            if server.exited():
                raise EngineError(
                    f"the server ended while it started; the end of {server.log_path}:\n{server.last_lines()}"
                )
            if _healthy(client):
                return
            time.sleep(0.25)
    finally:
        client.close()
    raise EngineError(
        f"the server did not answer within {timeout_s:g} s of its start; the end of {server.log_path}:\n"
        f"{server.last_lines()}"
    )


def _healthy(client: HttpClient) -> bool:
    try:
        return client.exchange("GET", "/health").status == 200
    except EngineUnreachable:
        return False


def free_port() -> int:
    """A port of loopback that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port

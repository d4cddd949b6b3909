"""`zerodrift serve` as a process of its own, on a free port."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOKEN = "a-token-of-tests-alone"
PATIENCE_S = 120


class Server:
    """A process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)


@contextmanager
def served(
    root: Path, *options: str, model: str, log: Path | None = None, open_files: int | None = None
) -> Iterator[Server]:
    """Listens on a free port, reads weights below `root`, and takes the token in `root`/token.

    `log`: where stderr goes; `open_files`: as many as a shell would allow."""
    token = root / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    said = None if log is None else log.open("w")
    shell = [] if open_files is None else ["sh", "-c", f'ulimit -Sn {open_files}; exec "$@"', "sh"]
    process = subprocess.Popen(
        [
            *shell, sys.executable, "-m", "zerodrift.cli.main", "serve", model, "--port", "0", "--weight-root", str(root),
            "--admin-token-file", str(token), *options,
        ],
        stdout=subprocess.PIPE, stderr=said, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert address, line
        yield Server(process, address[0])
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stdout.close()
        if said is not None:
            said.close()

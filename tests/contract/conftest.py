"""What the suites share: a server on loopback, things that are closed, checkpoints."""

import contextlib
import json
import sys
from pathlib import Path

import pytest

# What the suites share are plain modules that find each other as scripts do.
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("promises", "asking")

from loopback import serving  # noqa: E402


@pytest.fixture
def loopback():
    with serving() as server:
        yield server


@pytest.fixture
def closing():
    """What is handed to it is closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda opened: stack.enter_context(contextlib.closing(opened))


ENGINE = """
import http.server, json, os, signal, subprocess, sys, threading, time
port = int(sys.argv[sys.argv.index("--port") + 1] if "--port" in sys.argv else sys.argv[4])
print("command", " ".join(sys.argv[1:]))
for name, value in sorted(os.environ.items()):
    print("env", name, value)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
print("child", child.pid, flush=True)
{body}
ANSWERS = {{"/health": {{}}, **json.loads({answers!r})}}
class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers["content-length"] or 0))
        text = json.dumps(ANSWERS.get(self.path)).encode()
        self.send_response(200 if self.path in ANSWERS else 404)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_POST = do_GET
http.server.HTTPServer(("127.0.0.1", port), Server).serve_forever()
"""
"""Stands where an engine's interpreter would: takes its command line, starts a child as vLLM does, and answers."""


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """A script in the place of an engine's interpreter, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(body="", answers=None, source=""):
        script = tmp_path / "python"
        text = source or ENGINE.format(body=body, answers=json.dumps(answers or {}))
        script.write_text(f"#!{sys.executable}\n{text}")
        script.chmod(0o755)
        return script

    return write


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directories with the weights of the testbed, with others, and with others of another shape."""
    from opened import write_checkpoints

    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))

